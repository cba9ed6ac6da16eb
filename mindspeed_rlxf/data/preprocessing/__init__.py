"""Make indexed prompt data sets from files of rows."""
