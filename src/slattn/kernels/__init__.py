"""Device programs, and the launch configurations they are compiled for."""
