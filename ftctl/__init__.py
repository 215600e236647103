"""ftctl: looks at and changes a running ftd."""
