//! Opens TCP connections to a member's API server. Each address is checked immediately before it is dialled.

use std::{
    net::{IpAddr, SocketAddr},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use http::Uri;
use hyper_util::{
    client::legacy::connect::{HttpConnector, dns::Name},
    rt::TokioIo,
};
use tokio::net::TcpStream;
use tower::{BoxError, Service};

use crate::kubeconfig::{HubHosts, host_of};

/// How long a connection is idle before TCP probes the other end.
const KEEPALIVE: Duration = Duration::from_secs(10);
/// The connection ends when sent data is unacknowledged, or nothing has arrived on an idle connection, for this time. An idle connection
/// then has sent probes after 10, 15 and 20 s.
const UNACKNOWLEDGED: Duration = Duration::from_secs(25);

type Pending<T> = Pin<Box<dyn Future<Output = Result<T, BoxError>> + Send>>;

/// A function that looks up the addresses of a host name.
type Lookup = dyn Fn(String) -> Pending<Vec<SocketAddr>> + Send + Sync;

/// Looks up a host name, and refuses the name if one of its addresses is not allowed for a member's API server. The connector dials
/// only the returned addresses, so a name whose addresses change between two look-ups (DNS rebinding) bypasses no check.
#[derive(Clone)]
pub(crate) struct Resolver {
    /// Refuses the hub's API server, and addresses that are forbidden for every member, such as loopback.
    hub: HubHosts,
    port: u16,
    lookup: Arc<Lookup>,
}

impl Service<Name> for Resolver {
    type Response = std::vec::IntoIter<SocketAddr>;
    type Error = BoxError;
    type Future = Pending<Self::Response>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, name: Name) -> Self::Future {
        let (hub, port) = (self.hub.clone(), self.port);
        let found = (self.lookup)(name.as_str().to_owned());
        Box::pin(async move {
            let found = found.await?;
            for address in &found {
                hub.check(address.ip(), port)?;
            }
            Ok(found.into_iter())
        })
    }
}

/// Connects to the host of a URI. The host is a name or an IP address.
#[derive(Clone)]
pub(crate) struct Connector {
    http: HttpConnector<Resolver>,
    hub: HubHosts,
}

impl Connector {
    /// Creates a connector for a server on this port.
    pub(crate) fn new(hub: HubHosts, port: u16) -> Self {
        let lookup = |name: String| -> Pending<Vec<SocketAddr>> {
            Box::pin(async move { Ok(tokio::net::lookup_host((name, 0)).await?.collect()) })
        };
        Self::with(hub, port, Arc::new(lookup))
    }

    fn with(hub: HubHosts, port: u16, lookup: Arc<Lookup>) -> Self {
        let resolver = Resolver {
            hub: hub.clone(),
            port,
            lookup,
        };
        let mut http = HttpConnector::new_with_resolver(resolver);
        // The URI has the scheme https, but this connector only opens the TCP connection below TLS.
        http.enforce_http(false);
        http.set_nodelay(true);
        // A watch would receive nothing until its timeout if the server vanished without ending the connection.
        http.set_keepalive(Some(KEEPALIVE));
        http.set_keepalive_interval(Some(Duration::from_secs(5)));
        http.set_tcp_user_timeout(Some(UNACKNOWLEDGED));
        Self { http, hub }
    }
}

impl Service<Uri> for Connector {
    type Response = TokioIo<TcpStream>;
    type Error = BoxError;
    type Future = Pending<Self::Response>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        Service::poll_ready(&mut self.http, cx).map_err(Into::into)
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        // The resolver is not called for an IP address. The address was checked when the kubeconfig was read, but the hub's
        // addresses may have been set after that.
        let (host, port) = (host_of(uri.host().unwrap_or_default()), uri.port_u16().unwrap_or(443));
        if let Ok(address) = host.parse::<IpAddr>()
            && let Err(refused) = self.hub.check(address, port)
        {
            return Box::pin(std::future::ready(Err(refused.into())));
        }
        let dialled = Service::call(&mut self.http, uri);
        Box::pin(async move { Ok(dialled.await?) })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;
    use crate::{cause, kubeconfig::Refused};

    /// Dials `uri` with a resolver that returns the next element of `answers` for each look-up. Also returns the number of look-ups.
    async fn dial(hub: &HubHosts, uri: &str, answers: &[&[&str]]) -> (Result<(), String>, usize) {
        let answers: Vec<Vec<IpAddr>> = (answers.iter())
            .map(|addresses| addresses.iter().map(|text| text.parse().unwrap()).collect())
            .collect();
        let lookups = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&lookups);
        let lookup = move |_| -> Pending<Vec<SocketAddr>> {
            let answer = answers.get(counted.fetch_add(1, Ordering::Relaxed)).cloned();
            Box::pin(async move {
                let found = answer.ok_or("no such name")?;
                Ok(found.into_iter().map(|ip| SocketAddr::new(ip, 0)).collect())
            })
        };
        let uri: Uri = uri.parse().unwrap();
        let mut connector = Connector::with(hub.clone(), uri.port_u16().unwrap_or(443), Arc::new(lookup));
        let dialled = Service::call(&mut connector, uri).await;
        let outcome = dialled.map(drop).map_err(|error| {
            let refused = cause::<Refused>(&*error);
            refused.map_or_else(|| format!("not refused: {error:?}"), |refused| refused.to_string())
        });
        (outcome, lookups.load(Ordering::Relaxed))
    }

    // threat: kubeconfig-address
    #[tokio::test]
    async fn name_with_a_refused_address_is_not_dialled() {
        // With this listener, a dial would succeed.
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let uri = format!("https://api.tenant.example:{port}");
        let refused = "the kubeconfig's clusters[].cluster.server is refused: it is a loopback address";
        for answer in [&["127.0.0.1"][..], &["192.0.2.7", "127.0.0.1"], &["::ffff:127.0.0.1"]] {
            // A second look-up would return an allowed address.
            let dialled = dial(&HubHosts::default(), &uri, &[answer, &["192.0.2.7"]]).await;
            assert_eq!(dialled, (Err(refused.to_owned()), 1), "{answer:?}");
        }
    }

    // threat: kubeconfig-address
    #[tokio::test]
    async fn name_that_cannot_be_looked_up_is_not_dialled() {
        let (dialled, lookups) = dial(&HubHosts::default(), "https://api.tenant.example:6443", &[]).await;
        assert_eq!(lookups, 1);
        assert!(dialled.unwrap_err().contains("no such name"));
    }

    // threat: kubeconfig-address
    #[tokio::test]
    async fn address_of_the_hubs_api_server_is_not_dialled() {
        let hub = HubHosts::default();
        hub.set_addresses(["198.51.100.4:6443".parse().unwrap()].into());
        let refused = "the kubeconfig's clusters[].cluster.server is refused: it is the hub's own API server; the hub's entry is the one with `local: true`";
        for (uri, answers) in [
            ("https://198.51.100.4:6443", &[][..]),
            ("https://node.example:6443", &[&["198.51.100.4"][..]][..]),
            // The NAT64 form of the same IPv4 address.
            ("https://node.example:6443", &[&["64:ff9b::c633:6404"][..]][..]),
        ] {
            assert_eq!(dial(&hub, uri, answers).await.0, Err(refused.to_owned()), "{uri}");
        }
    }
}
