//! The binary `wg-agent`. All code is in the library.

fn main() -> std::process::ExitCode {
    wg_agent::main()
}
