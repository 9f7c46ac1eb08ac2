//! The binary `clustermeshctl`.
#![forbid(unsafe_code)]

use std::{io, process::ExitCode};

fn main() -> ExitCode {
    clustermeshctl::run(
        std::env::args_os(),
        &mut io::stdin(),
        &mut io::stdout(),
        &mut io::stderr(),
    )
}
