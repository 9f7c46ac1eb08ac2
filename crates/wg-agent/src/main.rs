//! The process `wg-agent`; everything is in the library.

fn main() -> std::process::ExitCode {
    wg_agent::main()
}
