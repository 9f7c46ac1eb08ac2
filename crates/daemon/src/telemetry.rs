//! The log: one subscriber for the process, to standard error, as text or as JSON. What is logged is the callers' business.

use std::io::IsTerminal;

use tracing_subscriber::{EnvFilter, fmt, layer::SubscriberExt, util::SubscriberInitExt};

/// How log lines are written (`--log-format`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub enum LogFormat {
    /// For people.
    #[default]
    Text,
    /// One JSON object a line, its fields flat.
    Json,
}

/// What is logged where `RUST_LOG` says nothing: our own at info, the libraries' warnings.
const DEFAULT_FILTER: &str = "info,kube=warn,kube_client=warn,kube_runtime=error,hyper=warn,tower=warn,rustls=warn";

/// Sets up the log of this process; `RUST_LOG` chooses what is in it (tracing-subscriber's `EnvFilter` syntax).
///
/// # Errors
/// `RUST_LOG` does not parse, or a subscriber is already set.
pub fn init(format: LogFormat) -> anyhow::Result<()> {
    let filter = match std::env::var("RUST_LOG") {
        Ok(text) if !text.is_empty() => EnvFilter::try_new(&text)
            .map_err(|error| anyhow::anyhow!("RUST_LOG={text:?} does not parse ({error}); try RUST_LOG=debug"))?,
        _ => EnvFilter::new(DEFAULT_FILTER),
    };
    let registry = tracing_subscriber::registry().with(filter);
    match format {
        LogFormat::Text => registry
            .with(
                fmt::layer()
                    .with_writer(std::io::stderr)
                    .with_ansi(std::io::stderr().is_terminal()),
            )
            .try_init()?,
        LogFormat::Json => {
            registry
                .with(fmt::layer().json().flatten_event(true).with_writer(std::io::stderr))
                .try_init()?;
        }
    }
    Ok(())
}
