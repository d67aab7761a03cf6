"""What implementations of several libraries share on a GPU: recorded graphs, the interpreter."""
