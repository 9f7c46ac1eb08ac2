//! Sets up the log of the process: to standard error, as text or as JSON.

use std::io::IsTerminal;

use tracing_subscriber::{EnvFilter, fmt, layer::SubscriberExt, util::SubscriberInitExt};

/// The format of log lines (`--log-format`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub enum LogFormat {
    /// Text for people.
    #[default]
    Text,
    /// One JSON object per line, without nested objects.
    Json,
}

/// The filter without `RUST_LOG`: events from level info; from the named libraries, only warnings or errors. boringtun is off because it
/// logs an error for each unreachable peer every 90 s. The agent's status reports such peers.
const DEFAULT_FILTER: &str = "info,boringtun=off,kube=warn,kube_runtime=error,hyper=warn,tower=warn,rustls=warn";

/// Disables the log of `kube_client`, whatever level `RUST_LOG` sets for it or for all crates. Only a level for one module of
/// `kube_client` stays in force. kube-client logs whole responses with their newlines, and an API server may be hostile. Our code
/// logs failed requests itself.
const KUBE_CLIENT_OFF: &str = "kube_client=off";

/// Creates the filter of the log. `given` is the value of `RUST_LOG`.
///
/// # Errors
/// `given` does not parse.
pub fn filter(given: Option<&str>) -> anyhow::Result<EnvFilter> {
    let filter = match given {
        Some(text) if !text.is_empty() => EnvFilter::try_new(text)
            .map_err(|error| anyhow::anyhow!("RUST_LOG={text:?} does not parse ({error}); try RUST_LOG=debug"))?,
        _ => EnvFilter::new(DEFAULT_FILTER),
    };
    Ok(filter.add_directive(KUBE_CLIENT_OFF.parse()?))
}

/// Sets up the log of this process. `RUST_LOG` filters it (tracing-subscriber's `EnvFilter` syntax).
///
/// # Errors
/// `RUST_LOG` does not parse, or a subscriber is already set.
pub fn init(format: LogFormat) -> anyhow::Result<()> {
    let filter = filter(std::env::var("RUST_LOG").ok().as_deref())?;
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

#[cfg(test)]
mod tests {
    use std::{
        io,
        sync::{Arc, Mutex},
    };

    use super::*;

    #[derive(Clone, Default)]
    struct Written(Arc<Mutex<Vec<u8>>>);

    impl io::Write for Written {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().extend(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    // threat: log-injection
    #[test]
    fn level_in_rust_log_does_not_log_kube_client() {
        for given in [None, Some("debug"), Some("warn,kube_client=trace")] {
            let written = Written::default();
            let sink = written.clone();
            let subscriber = tracing_subscriber::registry()
                .with(filter(given).unwrap())
                .with(fmt::layer().with_writer(move || sink.clone()));
            tracing::subscriber::with_default(subscriber, || {
                tracing::warn!(target: "kube_client::client", "an answer\nof a member");
                tracing::warn!(target: "clustermesh_controller", "ours");
            });
            let text = String::from_utf8(written.0.lock().unwrap().clone()).unwrap();
            assert!(text.contains("ours") && !text.contains("answer"), "{given:?}: {text}");
        }
    }
}
