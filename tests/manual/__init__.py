"""What checks the manual: blocks out of Markdown, sessions typed in a shell, and messages made by the real code."""
