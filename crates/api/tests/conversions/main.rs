//! Tests the conversions of objects that anyone may have written.

mod totality;
