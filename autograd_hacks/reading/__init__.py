"""From records to forms: checks whether a record may be read, finds the loss's scale, and adds up the calls' forms."""
