"""What may run where, by the rules and by what releases declare: ``kernelproof support``."""
