//! The process `wg-agent`; everything is in the library.

fn main() {}
