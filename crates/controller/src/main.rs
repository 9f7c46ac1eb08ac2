//! The program `clustermesh-controller`: parses the command line, starts logging and runs the controller.
#![forbid(unsafe_code)]

use clap::Parser;
use clustermesh_controller::{args::Args, run};
use clustermesh_daemon::{descriptors, drain, telemetry};

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    telemetry::init(args.log_format)?;
    descriptors::raise_limit();
    run::run(args, drain::on_signal()?).await
}
