"""What two releases have and declare: callables, parameters, enums, support."""
