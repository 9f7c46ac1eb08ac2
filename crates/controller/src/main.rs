//! The program `clustermesh-controller`: prepares the process (arguments, logging, file descriptors) and runs the controller until a
//! signal stops it.
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
