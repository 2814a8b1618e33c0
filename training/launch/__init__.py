"""The ranks of a run as processes: started, watched, asked what they do, ended."""
