"""From records to forms: may they be read, how is the loss scaled, one call after the other."""
