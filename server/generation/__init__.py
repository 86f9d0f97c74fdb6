"""Generation for all APIs: shared body fields, submission, Outputs, measurements."""
