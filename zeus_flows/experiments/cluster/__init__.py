"""A cluster of recurring jobs that overlap (section 6.3): what each policy would have cost."""
