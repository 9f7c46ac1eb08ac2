//! The admin endpoint of a program (`--listen`): `/metrics`, `/healthz`, `/readyz`, `/debug/state`. It is read-only, and the dumped
//! state contains no secrets. The state lists peers and connections, and untrusted hosts may reach the port, so `/debug/state` is
//! served only to loopback clients. A program whose port the agent's firewall does not protect also restricts `/metrics` to them
//! ([`Audience`]).

use std::{
    collections::VecDeque,
    fmt,
    future::poll_fn,
    io,
    net::{Ipv4Addr, Ipv6Addr, SocketAddr},
    sync::Arc,
    task::Poll,
    time::Duration,
};

use anyhow::Context;
use axum::{Extension, Router, extract, http::StatusCode, response::IntoResponse, routing::get};
use hyper::server::conn::http1;
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    server::graceful::GracefulShutdown,
    service::TowerToHyperService,
};
use prometheus_client::registry::Registry;
use rustix::{io::Errno, net::sockopt::set_ipv6_v6only};
use tokio::{
    net::{TcpListener, TcpSocket, TcpStream},
    task::AbortHandle,
};
use tokio_util::sync::CancellationToken;

use crate::{liveness::Liveness, metrics, readiness::Readiness};

/// The listen backlog: the value of the examples in the documentation of tokio.
const BACKLOG: u32 = 1024;
/// The maximum number of concurrent connections: many more than probes, metric scrapers and a person need. Most file descriptors of the
/// process (often 1,024 before [`crate::descriptors`] raises the limit) are left for the program's own work.
const MAX_CONNECTIONS: usize = 64;
/// Timeout for the head of a request, and therefore also for an idle connection.
const HEADER_TIMEOUT: Duration = Duration::from_secs(10);

/// The clients to which a page is served.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Audience {
    /// Every client that can reach the port.
    Everyone,
    /// Only clients with a loopback address. Other clients get 403.
    Loopback,
}

/// The data that the endpoint serves.
#[derive(Clone)]
pub struct State {
    /// The metrics for `/metrics`.
    pub registry: Arc<Registry>,
    /// The clients to which `/metrics` is served. The labels of the metrics contain names of meshes and clusters.
    pub metrics_for: Audience,
    /// `/readyz`: 200, or 503 with the pending items; then the remarks in both cases. Each item and remark is on its own line.
    pub readiness: Readiness,
    /// `/healthz`: 200, or 503 with the silent loops. Each of them is on its own line.
    pub liveness: Liveness,
    /// `/debug/state`: called for each request. The result must contain no secrets. Clients without a loopback address get 403.
    pub dump: Arc<dyn Fn() -> serde_json::Value + Send + Sync>,
}

impl fmt::Debug for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("State")
            .field("readiness", &self.readiness)
            .field("liveness", &self.liveness)
            .finish()
    }
}

/// A bound endpoint that does not serve yet.
#[derive(Debug)]
pub struct Admin {
    /// One listener, or one for each interface of [`Self::bind_to_interfaces`]; all for the same address.
    listeners: Vec<TcpListener>,
}

impl Admin {
    /// Binds the address. This is separate from [`Self::serve`], so that a program does not start if the port is in use, and so that
    /// the caller learns which port the kernel has chosen for port 0. `[::]` also serves IPv4, and only IPv4 if the kernel has no IPv6.
    ///
    /// # Errors
    /// The address cannot be bound.
    pub fn bind(listen: SocketAddr) -> anyhow::Result<Self> {
        let listener = listen_on(listen, None).with_context(|| {
            format!("cannot listen on {listen} for metrics and health; choose another address with --listen")
        })?;
        Ok(Self {
            listeners: vec![listener],
        })
    }

    /// Like [`Self::bind`], but accepts only connections that arrive on one of these interfaces (SO_BINDTODEVICE). On other interfaces
    /// the port is closed even if the firewall allows it. Linux before 5.7 requires CAP_NET_RAW for this.
    ///
    /// # Errors
    /// The address or one of the interfaces cannot be bound.
    pub fn bind_to_interfaces<'a>(
        listen: SocketAddr,
        interfaces: impl IntoIterator<Item = &'a str>,
    ) -> anyhow::Result<Self> {
        let bound = interfaces.into_iter().map(|interface| {
            listen_on(listen, Some(interface))
                .with_context(|| format!("cannot listen on {listen} of interface {interface} for metrics and health"))
        });
        let listeners: Vec<_> = bound.collect::<Result<_, _>>()?;
        anyhow::ensure!(!listeners.is_empty(), "no interface to listen on");
        Ok(Self { listeners })
    }

    /// The address on which the endpoint listens.
    ///
    /// # Errors
    /// getsockname(2) fails, which is not expected for a bound socket.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listeners[0].local_addr()
    }

    /// Accepts the next connection of any listener.
    async fn accept(&self) -> io::Result<(TcpStream, SocketAddr)> {
        poll_fn(|context| {
            let mut accepted = self.listeners.iter().map(|listener| listener.poll_accept(context));
            accepted.find(Poll::is_ready).unwrap_or(Poll::Pending)
        })
        .await
    }

    /// Serves until the token is cancelled.
    ///
    /// If there are `MAX_CONNECTIONS` connections, a new one closes the oldest. So a client that opens many idle connections does not
    /// block the kubelet's probe.
    ///
    /// # Errors
    /// No error occurs at present.
    pub async fn serve(self, state: State, stop: CancellationToken) -> anyhow::Result<()> {
        let routes = Router::new()
            .route("/metrics", get(show_metrics))
            .route("/healthz", get(show_health))
            .route("/readyz", get(show_readiness))
            .route("/debug/state", get(show_state))
            .with_state(state);
        let mut http = http1::Builder::new();
        http.timer(TokioTimer::new()).header_read_timeout(HEADER_TIMEOUT);
        let shutdown = GracefulShutdown::new();
        let mut open: VecDeque<AbortHandle> = VecDeque::new();
        loop {
            let accepted = tokio::select! {
                () = stop.cancelled() => break,
                accepted = self.accept() => accepted,
            };
            let (stream, from) = match accepted {
                Ok(accepted) => accepted,
                Err(error) => {
                    // Either this one connection failed, or no file descriptor is free at the moment.
                    tracing::debug!(%error, "cannot accept a connection");
                    tokio::time::sleep(Duration::from_millis(100)).await;
                    continue;
                }
            };
            let routes = routes.clone().layer(Extension(extract::ConnectInfo(from)));
            let connection = http.serve_connection(TokioIo::new(stream), TowerToHyperService::new(routes));
            open.retain(|connection| !connection.is_finished());
            if open.len() >= MAX_CONNECTIONS
                && let Some(oldest) = open.pop_front()
            {
                oldest.abort();
            }
            open.push_back(tokio::spawn(shutdown.watch(connection)).abort_handle());
        }
        drop(self.listeners);
        shutdown.shutdown().await;
        Ok(())
    }
}

async fn show_metrics(
    extract::State(state): extract::State<State>,
    extract::ConnectInfo(from): extract::ConnectInfo<SocketAddr>,
) -> impl IntoResponse {
    if state.metrics_for == Audience::Loopback && !is_loopback(from) {
        return refuse_remote_client();
    }
    match metrics::encode(&state.registry) {
        Ok(text) => (StatusCode::OK, [("content-type", metrics::CONTENT_TYPE)], text),
        Err(error) => (
            StatusCode::INTERNAL_SERVER_ERROR,
            [("content-type", "text/plain")],
            error.to_string(),
        ),
    }
}

async fn show_health(extract::State(state): extract::State<State>) -> (StatusCode, String) {
    let silent: Vec<_> = state
        .liveness
        .silent()
        .into_iter()
        .map(|(name, silent)| format!("{name}: silent for {} s", silent.as_secs()))
        .collect();
    verdict(&silent)
}

async fn show_readiness(extract::State(state): extract::State<State>) -> (StatusCode, String) {
    let (status, text) = verdict(&state.readiness.pending_items());
    let remarks = state.readiness.remarks();
    let remarks: String = remarks.iter().map(|remark| format!("but: {remark}\n")).collect();
    (status, text + &remarks)
}

/// Returns 200 and `ok`, or 503 and one line for each pending item or silent loop.
fn verdict(obstacles: &[String]) -> (StatusCode, String) {
    if obstacles.is_empty() {
        (StatusCode::OK, "ok\n".to_owned())
    } else {
        (StatusCode::SERVICE_UNAVAILABLE, obstacles.join("\n") + "\n")
    }
}

async fn show_state(
    extract::State(state): extract::State<State>,
    extract::ConnectInfo(from): extract::ConnectInfo<SocketAddr>,
) -> impl IntoResponse {
    if !is_loopback(from) {
        return refuse_remote_client();
    }
    (
        StatusCode::OK,
        [("content-type", "application/json")],
        format!("{:#}\n", (state.dump)()),
    )
}

/// Listens on an address. A socket at `[::]` also serves IPv4 and reports IPv4 clients as IPv4-mapped IPv6 addresses. On a kernel
/// without IPv6 (`ipv6.disable=1`), `[::]` becomes `0.0.0.0`.
fn listen_on(address: SocketAddr, interface: Option<&str>) -> io::Result<TcpListener> {
    let bound = |address: SocketAddr| {
        let socket = if address.is_ipv4() {
            TcpSocket::new_v4()
        } else {
            TcpSocket::new_v6()
        }?;
        if address.is_ipv6() {
            // The sysctl net.ipv6.bindv6only may have another default.
            set_ipv6_v6only(&socket, false)?;
        }
        socket.set_reuseaddr(true)?;
        socket.bind_device(interface.map(str::as_bytes))?;
        socket.bind(address)?;
        socket.listen(BACKLOG)
    };
    let any: SocketAddr = (Ipv4Addr::UNSPECIFIED, address.port()).into();
    match bound(address) {
        Err(error)
            if address.ip() == Ipv6Addr::UNSPECIFIED
                && error.raw_os_error() == Some(Errno::AFNOSUPPORT.raw_os_error()) =>
        {
            bound(any)
        }
        other => other,
    }
}

fn is_loopback(from: SocketAddr) -> bool {
    from.ip().to_canonical().is_loopback()
}

fn refuse_remote_client() -> (StatusCode, [(&'static str, &'static str); 1], String) {
    let text = "served only to 127.0.0.1 and ::1: use kubectl port-forward to the pod, kubectl exec where it has a shell, or \
                curl on the node itself\n";
    (StatusCode::FORBIDDEN, [("content-type", "text/plain")], text.to_owned())
}

#[cfg(test)]
mod tests {
    use std::io::ErrorKind;

    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    async fn fetch(address: SocketAddr, path: &str) -> (u16, String) {
        let mut stream = TcpStream::connect(address).await.expect("connects");
        let request = format!("GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await.expect("writes");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.expect("reads");
        let status = answer
            .split(' ')
            .nth(1)
            .and_then(|word| word.parse().ok())
            .expect("a status line");
        (status, answer.split_once("\r\n\r\n").expect("a body").1.to_owned())
    }

    #[tokio::test]
    async fn endpoint_shows_pending_items_silent_loops_and_state() {
        let readiness = Readiness::new();
        let liveness = Liveness::new();
        let admin = Admin::bind(SocketAddr::from(([127, 0, 0, 1], 0))).expect("binds");
        let address = admin.local_addr().expect("has an address");
        let state = State {
            registry: Arc::new(metrics::registry("test", "1")),
            metrics_for: Audience::Loopback,
            readiness: readiness.clone(),
            liveness: liveness.clone(),
            dump: Arc::new(|| serde_json::json!({"peers": 3})),
        };
        let stop = CancellationToken::new();
        let served = tokio::spawn(admin.serve(state, stop.clone()));

        let (pending, silent) = (
            readiness.pending("first list of Peers"),
            liveness.watch("loop", Duration::ZERO),
        );
        assert_eq!(
            fetch(address, "/readyz").await,
            (503, "first list of Peers\n".to_owned())
        );
        assert_eq!(
            fetch(address, "/healthz").await,
            (503, "loop: silent for 0 s\n".to_owned())
        );
        drop(pending);
        let remark = readiness.remark("from the cache");
        assert_eq!(
            fetch(address, "/readyz").await,
            (200, "ok\nbut: from the cache\n".to_owned())
        );
        drop((remark, silent));
        assert_eq!(fetch(address, "/readyz").await, (200, "ok\n".to_owned()));
        assert_eq!(fetch(address, "/healthz").await, (200, "ok\n".to_owned()));
        assert_eq!(
            fetch(address, "/debug/state").await,
            (200, "{\n  \"peers\": 3\n}\n".to_owned())
        );
        let (status, metrics) = fetch(address, "/metrics").await;
        assert_eq!((status, metrics.contains("test_build_info")), (200, true), "{metrics}");

        stop.cancel();
        served.await.expect("no panic").expect("no error");
    }

    /// The address of a served endpoint, the token that stops it, and its task.
    type Served = (
        SocketAddr,
        CancellationToken,
        tokio::task::JoinHandle<anyhow::Result<()>>,
    );

    async fn serve_on_loopback() -> Served {
        spawn(Admin::bind(SocketAddr::from(([127, 0, 0, 1], 0))).expect("binds"))
    }

    fn spawn(admin: Admin) -> Served {
        let address = admin.local_addr().expect("has an address");
        let state = State {
            registry: Arc::new(metrics::registry("test", "1")),
            metrics_for: Audience::Everyone,
            readiness: Readiness::new(),
            liveness: Liveness::new(),
            dump: Arc::new(|| serde_json::json!({})),
        };
        let stop = CancellationToken::new();
        let served = tokio::spawn(admin.serve(state, stop.clone()));
        (address, stop, served)
    }

    #[tokio::test]
    async fn unspecified_ipv6_address_answers_both_families() {
        let any = SocketAddr::from((Ipv6Addr::UNSPECIFIED, 0));
        let (address, stop, served) = spawn(Admin::bind(any).expect("binds"));
        for loopback in [Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()] {
            let at = SocketAddr::new(loopback, address.port());
            assert_eq!(fetch(at, "/debug/state").await.0, 200, "{at}");
        }
        stop.cancel();
        served.await.expect("no panic").expect("no error");
    }

    // threat: gateway-port
    #[tokio::test]
    async fn endpoint_binds_to_interface_and_refuses_missing_one() {
        let any = SocketAddr::from(([0, 0, 0, 0], 0));
        let admin = Admin::bind_to_interfaces(any, ["lo"]).expect("binds");
        let (address, stop, served) = spawn(admin);
        let at = SocketAddr::from(([127, 0, 0, 1], address.port()));
        assert_eq!(fetch(at, "/healthz").await, (200, "ok\n".to_owned()));
        stop.cancel();
        served.await.expect("no panic").expect("no error");
        let error = Admin::bind_to_interfaces(at, ["none-such"]).expect_err("the interface does not exist");
        assert!(format!("{error:#}").contains("of interface none-such"), "{error:#}");
    }

    // threat: admin-port-flood
    #[tokio::test]
    async fn idle_connections_beyond_the_limit_are_closed() {
        let (address, stop, served) = serve_on_loopback().await;
        let mut idle = Vec::new();
        for _ in 0..3 * MAX_CONNECTIONS {
            idle.push(TcpStream::connect(address).await.expect("connects"));
        }
        assert_eq!(fetch(address, "/healthz").await, (200, "ok\n".to_owned()));
        let is_closed = |stream: &mut TcpStream| {
            let read = stream.try_read(&mut [0; 1]);
            !matches!(read, Err(error) if error.kind() == ErrorKind::WouldBlock)
        };
        for stream in &mut idle[..2 * MAX_CONNECTIONS] {
            stream.readable().await.expect("the connection is closed");
            assert!(is_closed(stream));
        }
        stop.cancel();
        served.await.expect("no panic").expect("no error");
    }

    // threat: admin-port-flood
    #[tokio::test(start_paused = true)]
    async fn connection_with_unfinished_request_head_is_closed() {
        let (address, _stop, _served) = serve_on_loopback().await;
        let mut stream = TcpStream::connect(address).await.expect("connects");
        stream
            .write_all(b"GET /healthz HTTP/1.1\r\nhost: x\r\n")
            .await
            .expect("writes");
        let began = tokio::time::Instant::now();
        let mut answer = String::new();
        stream
            .read_to_string(&mut answer)
            .await
            .expect("the connection is closed");
        assert!(
            !answer.contains(" 200 ") && began.elapsed() >= HEADER_TIMEOUT,
            "{answer}"
        );
    }

    // threat: controller-port
    #[tokio::test]
    async fn debug_state_and_loopback_metrics_refuse_remote_clients() {
        let state = |metrics_for| State {
            registry: Arc::new(metrics::registry("test", "1")),
            metrics_for,
            readiness: Readiness::new(),
            liveness: Liveness::new(),
            dump: Arc::new(|| serde_json::json!({"peers": 3})),
        };
        for (from, local) in [
            ("127.0.0.1:7", true),
            ("[::1]:7", true),
            ("[::ffff:127.0.0.1]:7", true),
            ("192.0.2.7:7", false),
            ("[::ffff:192.0.2.7]:7", false),
            ("[2001:db8::7]:7", false),
        ] {
            let from = extract::ConnectInfo(from.parse::<SocketAddr>().expect("an address"));
            let dump = show_state(extract::State(state(Audience::Everyone)), from).await;
            let restricted = show_metrics(extract::State(state(Audience::Loopback)), from).await;
            let open = show_metrics(extract::State(state(Audience::Everyone)), from).await;
            for (page, shown, content) in [
                (dump.into_response(), local, "\"peers\": 3"),
                (restricted.into_response(), local, "test_build_info"),
                (open.into_response(), true, "test_build_info"),
            ] {
                let status = page.status().as_u16();
                let body = axum::body::to_bytes(page.into_body(), 1000).await.expect("a body");
                let body = String::from_utf8_lossy(&body);
                let want = if shown {
                    (200, content)
                } else {
                    (403, "kubectl port-forward")
                };
                assert!(status == want.0 && body.contains(want.1), "{from:?}: {status} {body}");
                assert_eq!(body.contains(content), shown, "{from:?}: {body}");
            }
        }
    }
}
