"""What rooms share of the operating system: files, threads and forks, the terminal."""
