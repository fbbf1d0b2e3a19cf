"""What a runtime is given to build, and the checks of what roles return. Runtimes themselves are plugins."""
