//! Resolves the host names of endpoints and of the API server repeatedly in the background.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::Arc,
    time::Duration,
};

use futures::{StreamExt, stream};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

/// Pause between two rounds of lookups. A change of the set of names ends the pause.
const INTERVAL: Duration = Duration::from_secs(30);
/// Timeout of one lookup.
const LOOKUP_TIMEOUT: Duration = Duration::from_secs(5);
/// Concurrent lookups.
const CONCURRENCY: usize = 16;

/// An address for each name that has one.
pub type Addresses = BTreeMap<String, IpAddr>;

/// Resolves the names in `wanted` until the token is cancelled or the sender of `wanted` is dropped. Calls `report` with all
/// addresses when they change, unless `wanted` is empty. A name keeps its address while the answers contain this address, so that
/// round-robin DNS does not move a peer. It also keeps the address while there is no answer. `known` contains the addresses
/// that an earlier process found.
pub async fn run(
    mut wanted: watch::Receiver<BTreeSet<String>>,
    known: Addresses,
    report: impl Fn(Addresses) + Send,
    stop: CancellationToken,
) {
    let mut known = Arc::new(known);
    loop {
        let names = wanted.borrow_and_update().clone();
        let old = &known;
        // `wanted` is empty before the first pass. The known addresses stay until then, so that the names of the first
        // pass can keep them.
        let has_names = !names.is_empty();
        let selected: Addresses = stream::iter(names)
            .map(|name| async move {
                let address = select_address(old.get(&name).copied(), &resolve(&name).await);
                address.map(|address| (name, address))
            })
            .buffer_unordered(CONCURRENCY)
            .filter_map(|entry| async { entry })
            .collect()
            .await;
        if has_names && selected != **old {
            known = Arc::new(selected);
            report(known.as_ref().clone());
        }
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(INTERVAL) => {}
            changed = wanted.changed() => if changed.is_err() { return },
        }
    }
}

async fn resolve(name: &str) -> BTreeSet<IpAddr> {
    match tokio::time::timeout(LOOKUP_TIMEOUT, tokio::net::lookup_host((name, 0))).await {
        Ok(Ok(answers)) => answers.map(|answer| answer.ip().to_canonical()).collect(),
        Ok(Err(error)) => {
            tracing::debug!(name, %error, "cannot resolve a name");
            BTreeSet::new()
        }
        Err(_) => BTreeSet::new(),
    }
}

fn select_address(old: Option<IpAddr>, answers: &BTreeSet<IpAddr>) -> Option<IpAddr> {
    match old {
        Some(old) if answers.is_empty() || answers.contains(&old) => Some(old),
        // IPv4 addresses sort before IPv6 addresses.
        _ => answers.first().copied(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn known_address_stays_until_names_are_wanted() {
        let known: Addresses = [("api.example".to_owned(), "192.0.2.1".parse().unwrap())].into();
        let (_wanted, receiver) = watch::channel(BTreeSet::new());
        let (reports, stop) = (std::sync::Mutex::new(vec![]), CancellationToken::new());
        stop.cancel();
        let report = |addresses| reports.lock().unwrap().push(addresses);
        run(receiver, known, report, stop).await;
        assert_eq!(*reports.lock().unwrap(), Vec::<Addresses>::new());
    }

    #[test]
    fn address_is_kept_while_dns_returns_it_or_nothing() {
        let ip = |text: &str| text.parse::<IpAddr>().unwrap();
        let set = |texts: &[&str]| texts.iter().map(|t| ip(t)).collect::<BTreeSet<_>>();
        assert_eq!(
            select_address(None, &set(&["fd00::1", "10.0.0.2", "10.0.0.1"])),
            Some(ip("10.0.0.1"))
        );
        assert_eq!(
            select_address(Some(ip("10.0.0.2")), &set(&["10.0.0.2", "10.0.0.1"])),
            Some(ip("10.0.0.2"))
        );
        assert_eq!(
            select_address(Some(ip("10.0.0.2")), &set(&["10.0.0.1"])),
            Some(ip("10.0.0.1"))
        );
        assert_eq!(select_address(Some(ip("10.0.0.2")), &set(&[])), Some(ip("10.0.0.2")));
        assert_eq!(select_address(None, &set(&[])), None);
    }
}
