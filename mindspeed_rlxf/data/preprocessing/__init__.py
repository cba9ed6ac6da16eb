"""Files of rows become an indexed prompt data set."""
