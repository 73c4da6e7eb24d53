"""What rooms share: files, threads and forks, the terminal, regular expressions of strangers."""
