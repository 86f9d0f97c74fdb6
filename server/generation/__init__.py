"""Generation, as all APIs share it: submission, Outputs, measurements."""
