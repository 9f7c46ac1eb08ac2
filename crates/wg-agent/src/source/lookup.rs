//! Names of endpoints and of the API server, looked up again and again in the background; who needs which name is said by
//! others.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::Arc,
    time::Duration,
};

use futures::{StreamExt, stream};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

/// How often a name is looked up.
const EVERY: Duration = Duration::from_secs(30);
/// How long one answer may take.
const PATIENCE: Duration = Duration::from_secs(5);
/// Lookups at a time.
const AT_ONCE: usize = 16;

/// An address for each name that has one now.
pub type Addresses = BTreeMap<String, IpAddr>;

/// Looks up whatever `wanted` holds until the token is cancelled. A name keeps its address as long as that is among the
/// answers, so that a rotating answer moves nobody, and while there is no answer at all.
/// `known` are the answers that an earlier process had.
pub async fn run(
    mut wanted: watch::Receiver<BTreeSet<String>>,
    known: Addresses,
    found: impl Fn(Addresses) + Send,
    stop: CancellationToken,
) {
    let mut known = Arc::new(known);
    loop {
        let names = wanted.borrow_and_update().clone();
        let old = &known;
        let answers: Addresses = stream::iter(names)
            .map(|name| async move {
                let address = keep(old.get(&name).copied(), &ask(&name).await);
                address.map(|address| (name, address))
            })
            .buffer_unordered(AT_ONCE)
            .filter_map(|answer| async { answer })
            .collect()
            .await;
        if answers != **old {
            known = Arc::new(answers);
            found(known.as_ref().clone());
        }
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(EVERY) => {}
            changed = wanted.changed() => if changed.is_err() { return },
        }
    }
}

async fn ask(name: &str) -> BTreeSet<IpAddr> {
    match tokio::time::timeout(PATIENCE, tokio::net::lookup_host((name, 0))).await {
        Ok(Ok(answers)) => answers.map(|answer| answer.ip().to_canonical()).collect(),
        Ok(Err(error)) => {
            tracing::debug!(name, %error, "name has no address");
            BTreeSet::new()
        }
        Err(_) => BTreeSet::new(),
    }
}

fn keep(old: Option<IpAddr>, answers: &BTreeSet<IpAddr>) -> Option<IpAddr> {
    match old {
        Some(old) if answers.is_empty() || answers.contains(&old) => Some(old),
        // IPv4 sorts first.
        _ => answers.first().copied(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_kept_while_it_is_among_the_answers_or_there_are_none() {
        let ip = |text: &str| text.parse::<IpAddr>().unwrap();
        let set = |texts: &[&str]| texts.iter().map(|t| ip(t)).collect::<BTreeSet<_>>();
        assert_eq!(
            keep(None, &set(&["fd00::1", "10.0.0.2", "10.0.0.1"])),
            Some(ip("10.0.0.1"))
        );
        assert_eq!(
            keep(Some(ip("10.0.0.2")), &set(&["10.0.0.2", "10.0.0.1"])),
            Some(ip("10.0.0.2"))
        );
        assert_eq!(keep(Some(ip("10.0.0.2")), &set(&["10.0.0.1"])), Some(ip("10.0.0.1")));
        assert_eq!(keep(Some(ip("10.0.0.2")), &set(&[])), Some(ip("10.0.0.2")));
        assert_eq!(keep(None, &set(&[])), None);
    }
}
