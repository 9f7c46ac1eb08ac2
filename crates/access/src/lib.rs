//! Makes Kubernetes clients from kubeconfigs, for the controller and `clustermeshctl`. A kubeconfig is either in a member's Secret
//! (hostile input, checked) or the user's own (trusted).
//!
//! # Example
//!
//! A kubeconfig that names a program is refused, because the controller would run it:
//!
//! ```
//! use clustermesh_access::{build_member_client, kubeconfig::HubHosts, memory::Account};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() {
//! let kubeconfig = b"
//! current-context: edge
//! contexts: [{name: edge, context: {cluster: edge, user: admin}}]
//! clusters: [{name: edge, cluster: {server: 'https://edge.example:6443', certificate-authority-data: LS0tLS1C}}]
//! users: [{name: admin, user: {exec: {command: aws, apiVersion: client.authentication.k8s.io/v1}}}]
//! ";
//! let refused = build_member_client(kubeconfig, None, &HubHosts::default(), &Account::standalone(64 << 20)).await;
//! let message = refused.err().unwrap().to_string();
//! assert!(message.starts_with("the kubeconfig has users[].user.exec, which is refused"), "{message}");
//! # }
//! ```
#![forbid(unsafe_code)]

use std::{error::Error, path::Path};

use hyper_timeout::TimeoutConnector;
use hyper_util::{client::legacy, rt::TokioExecutor};
use kube::{
    Client, Config,
    client::ConfigExt,
    config::{KubeConfigOptions, Kubeconfig, KubeconfigError},
};
use tower::{BoxError, Layer, ServiceExt};

pub mod bounds;
mod connect;
pub mod expiry;
pub mod kubeconfig;
pub mod memory;

use bounds::BoundLayer;
use connect::Connector;
use expiry::Expiry;
use kubeconfig::{HubHosts, Refused};
use memory::Account;

/// The maximum number of bytes that hyper buffers for one connection.
const CONNECTION_BUFFER: usize = 64 * 1024;

/// Why no client can be made for a member.
#[derive(Debug, thiserror::Error)]
pub enum MemberClientError {
    /// A field of the kubeconfig is refused.
    #[error(transparent)]
    Refused(#[from] Refused),
    /// The certificates do not parse. The message omits kube's error, because that may repeat parts of the kubeconfig.
    #[error("its certificates cannot be used; each must be base64 of PEM")]
    Certificates(#[source] Box<kube::Error>),
}

/// A client for a member.
pub struct MemberClient {
    /// The client.
    pub client: Client,
    /// When its credentials expire. `None` = they do not say it.
    pub expiry: Option<Expiry>,
}

/// Builds a client from a member's kubeconfig. The kubeconfig and the responses of the member's API server are hostile input.
/// The kubeconfig must not lead to the hub's API server, whose hosts are in `hub`. The memory of responses in transfer is charged to
/// `account`.
///
/// # Errors
/// The kubeconfig is refused, see [`kubeconfig::read`], or its certificates do not parse. Host names are resolved and checked at each
/// connection, not here. If a name is refused, the request fails with [`Refused`] among its causes.
pub async fn build_member_client(
    text: &[u8],
    context: Option<&str>,
    hub: &HubHosts,
    account: &Account,
) -> Result<MemberClient, MemberClientError> {
    let config = kubeconfig::read(text, context, hub).await?;
    // Only the certificates can still be invalid: `kubeconfig::read` has checked all other values.
    let client =
        build_client(&config, hub, account).map_err(|error| MemberClientError::Certificates(Box::new(error)))?;
    Ok(MemberClient {
        client,
        expiry: expiry::read(&config.auth_info),
    })
}

/// Builds kube's client stack without proxies, retries and request tracing, on top of our connector and response limits.
fn build_client(config: &Config, hub: &HubHosts, account: &Account) -> Result<Client, kube::Error> {
    let port = config.cluster_url.port_u16().unwrap_or(443);
    let tls = config.rustls_https_connector_with_connector(Connector::new(hub.clone(), port))?;
    let mut connector = TimeoutConnector::new(tls);
    connector.set_connect_timeout(config.connect_timeout);
    let http: legacy::Client<_, kube::client::Body> = legacy::Builder::new(TokioExecutor::new())
        .http1_max_buf_size(CONNECTION_BUFFER)
        .build(connector);
    let bounded = BoundLayer::new(account.clone()).layer(http.map_err(BoxError::from));
    let stack = tower::ServiceBuilder::new()
        .layer(config.base_uri_layer())
        .option_layer(config.auth_layer()?)
        .map_err(BoxError::from)
        .service(bounded);
    Ok(Client::new(stack, config.default_namespace.clone()))
}

/// Returns a copy of the first error of type `E` among `error` and its causes.
#[must_use]
pub fn cause<E: Error + Clone + 'static>(error: &(dyn Error + 'static)) -> Option<E> {
    let mut next = Some(error);
    // The limit ends the search in a cyclic chain.
    for _ in 0..16 {
        let error = next?;
        if let Some(found) = error.downcast_ref::<E>() {
            return Some(found.clone());
        }
        // `io::Error::source` skips the wrapped error and returns the source of the wrapped error.
        let inside = error.downcast_ref::<std::io::Error>().and_then(std::io::Error::get_ref);
        next = inside
            .map(|inside| inside as &(dyn Error + 'static))
            .or_else(|| error.source());
    }
    None
}

/// Reads the user's own kubeconfig, which is trusted. Without `file`, the path is the same as for kubectl (`KUBECONFIG`, else
/// `~/.kube/config`). Without `context`, the current context is used.
///
/// # Errors
/// The kubeconfig cannot be read, or has no such context.
pub async fn read_own_config(file: Option<&Path>, context: Option<&str>) -> Result<Config, KubeconfigError> {
    let kubeconfig = file.map_or_else(Kubeconfig::read, Kubeconfig::read_from)?;
    let options = KubeConfigOptions {
        context: context.map(str::to_owned),
        ..KubeConfigOptions::default()
    };
    Config::from_custom_kubeconfig(kubeconfig, &options).await
}

/// Returns the hosts of the hub's API server from `config` and from the environment variables of the pod.
#[must_use]
pub fn hub_hosts(config: &Config) -> HubHosts {
    let url = config
        .cluster_url
        .host()
        .map(|host| (kubeconfig::host_of(host), config.cluster_url.port_u16().unwrap_or(443)));
    let pod = std::env::var("KUBERNETES_SERVICE_HOST").ok().map(|host| {
        let port = std::env::var("KUBERNETES_SERVICE_PORT")
            .ok()
            .and_then(|port| port.parse().ok());
        (kubeconfig::host_of(&host), port.unwrap_or(443))
    });
    HubHosts::new(url.into_iter().chain(pod))
}
