//! Tests the conversions with arbitrary input, because any user or program may have written the objects.

mod arbitrary_objects;
