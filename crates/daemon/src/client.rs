//! Builds the client for the API server of the program's own cluster: kube's own stack, with connections that end soon after the server
//! has become unreachable.
//!
//! kube's connections have no keepalive. If the address of the host changes or a router forgets a connection, neither end is told, and
//! a watch would receive nothing until its timeout.

use std::time::Duration;

use hyper_timeout::TimeoutConnector;
use hyper_util::{
    client::legacy::{self, connect::HttpConnector},
    rt::TokioExecutor,
};
use kube::{
    Client, Config,
    client::{Body, ConfigExt, retry::RetryPolicy},
};
use tower::{BoxError, ServiceBuilder, ServiceExt, retry::RetryLayer};

/// How long a connection is idle before TCP probes the other end.
const KEEPALIVE: Duration = Duration::from_secs(10);
/// The connection ends when sent data is unacknowledged, or nothing has arrived on an idle connection, for this time. An idle connection
/// then has sent probes after 10, 15 and 20 s.
const UNACKNOWLEDGED: Duration = Duration::from_secs(25);

/// Sets the TCP options that end a connection to an unreachable server.
fn end_dead_connections<R>(connector: &mut HttpConnector<R>) {
    connector.set_keepalive(Some(KEEPALIVE));
    connector.set_keepalive_interval(Some(Duration::from_secs(5)));
    connector.set_tcp_user_timeout(Some(UNACKNOWLEDGED));
}

/// Builds a client; does not connect.
///
/// # Errors
/// kube cannot use the configuration, for example because of its TLS settings.
pub fn build(config: &Config) -> Result<Client, kube::Error> {
    if let Some(proxy) = &config.proxy_url {
        return Err(kube::Error::ProxyProtocolUnsupported {
            proxy_url: Box::new(proxy.clone()),
        });
    }
    let mut http = HttpConnector::new();
    // The URI has the scheme https, but this connector only opens the TCP connection below TLS.
    http.enforce_http(false);
    end_dead_connections(&mut http);
    let mut connector = TimeoutConnector::new(config.rustls_https_connector_with_connector(http)?);
    connector.set_connect_timeout(config.connect_timeout);
    connector.set_read_timeout(config.read_timeout);
    connector.set_write_timeout(config.write_timeout);
    connector.set_reset_reader_on_write(config.reset_reader_on_write);
    let http: legacy::Client<_, Body> = legacy::Builder::new(TokioExecutor::new()).build(connector);
    let stack = ServiceBuilder::new()
        .layer(config.base_uri_layer())
        .option_layer(
            config
                .default_retry
                .then(|| RetryLayer::new(RetryPolicy::server_retry())),
        )
        .option_layer(config.auth_layer()?)
        .layer(config.extra_headers_layer()?)
        .map_err(BoxError::from)
        .service(http);
    Ok(Client::new(stack.boxed(), config.default_namespace.clone()))
}
