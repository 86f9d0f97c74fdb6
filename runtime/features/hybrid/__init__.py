"""Models with recurrent layers: a request resumes at a point whose state is stored."""
