"""What people read: tables, savings, figures."""
