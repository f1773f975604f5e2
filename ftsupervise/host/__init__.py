"""This machine: whose a file is, how files are made and read safely, how an interpreter of ours is started."""
