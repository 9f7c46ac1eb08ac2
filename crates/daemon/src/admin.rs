//! The admin endpoint of a program (`--listen`): `/metrics`, `/healthz`, `/readyz`, `/debug/state`. Read-only and without
//! secrets, because the program leaves them out of the state that it dumps. The state lists peers and connections, and untrusted
//! hosts may reach the port, so `/debug/state` answers only loopback clients. `/metrics` does too in a program whose port the
//! agent's firewall does not close ([`Audience`]).

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

/// Connections that wait to be accepted, as in tokio and std.
const BACKLOG: u32 = 1024;
/// Concurrent connections: many more than probes, scrapers and a person need, and far fewer than the file descriptors of a
/// process (often 1,024 before [`crate::descriptors`] raises the limit), some of which the program needs for its own work.
const MAX_CONNECTIONS: usize = 64;
/// Time limit for the head of a request, and so also for an idle connection.
const HEADER_TIMEOUT: Duration = Duration::from_secs(10);

/// Which clients get a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Audience {
    /// Every client that reaches the port.
    Everyone,
    /// Clients of this network namespace; others get 403.
    Loopback,
}

/// What the endpoint shows.
#[derive(Clone)]
pub struct State {
    /// `/metrics`.
    pub registry: Arc<Registry>,
    /// Which clients get `/metrics`, whose labels name meshes and clusters.
    pub metrics_for: Audience,
    /// `/readyz`: 200 with remarks, or 503 with what is pending, one a line.
    pub readiness: Readiness,
    /// `/healthz`: 200, or 503 with the loops that are silent, one a line.
    pub liveness: Liveness,
    /// `/debug/state`: made for each request, without secrets. Clients outside the loopback interface get 403.
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
    /// At least one; all with the same address.
    listeners: Vec<TcpListener>,
}

impl Admin {
    /// Binds the address, so that a taken port fails the start of the program, and the port that the kernel chooses for port 0 is
    /// known. `[::]` also serves IPv4, and only IPv4 if the kernel has no IPv6.
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

    /// As [`Self::bind`], only for connections that come in by one of these interfaces (SO_BINDTODEVICE). On other interfaces the port
    /// is closed, whatever the firewall allows. Linux before 5.7 requires CAP_NET_RAW for that.
    ///
    /// # Errors
    /// The address cannot be bound, or one of the interfaces.
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

    /// The address on which it listens.
    ///
    /// # Errors
    /// The socket has no address (it always has).
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listeners[0].local_addr()
    }

    /// The next connection by any of the listeners.
    async fn accept(&self) -> io::Result<(TcpStream, SocketAddr)> {
        poll_fn(|context| {
            let mut accepted = self.listeners.iter().map(|listener| listener.poll_accept(context));
            accepted.find(Poll::is_ready).unwrap_or(Poll::Pending)
        })
        .await
    }

    /// Serves until the token is cancelled.
    ///
    /// Beyond `MAX_CONNECTIONS` a new connection closes the oldest one. So a client that opens many idle connections does not block
    /// the kubelet's probe.
    ///
    /// # Errors
    /// None at present.
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
    let (status, text) = verdict(&state.readiness.list());
    let remarks = state.readiness.remarks();
    let remarks: String = remarks.iter().map(|remark| format!("but: {remark}\n")).collect();
    (status, text + &remarks)
}

/// 200 `ok`, or 503 with one line for each pending item or problem.
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

/// Listens on an address. An IPv6 socket also serves IPv4 and reports IPv4 clients as IPv4-mapped IPv6 addresses. `[::]` becomes
/// `0.0.0.0` in a kernel without IPv6 (`ipv6.disable=1`).
fn listen_on(address: SocketAddr, interface: Option<&str>) -> io::Result<TcpListener> {
    let bound = |address: SocketAddr| {
        let socket = if address.is_ipv4() {
            TcpSocket::new_v4()
        } else {
            TcpSocket::new_v6()
        }?;
        if address.is_ipv6() {
            // The default is net.ipv6.bindv6only.
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
    let text = "shown to 127.0.0.1 and ::1 alone: use kubectl port-forward to the pod, kubectl exec where it has a shell, or \
                curl on the node itself\n";
    (StatusCode::FORBIDDEN, [("content-type", "text/plain")], text.to_owned())
}

#[cfg(test)]
mod tests {
    use std::io::ErrorKind;

    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    async fn ask(address: SocketAddr, path: &str) -> (u16, String) {
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

        let (pending, wedged) = (
            readiness.pending("first list of Peers"),
            liveness.watch("loop", Duration::ZERO),
        );
        assert_eq!(ask(address, "/readyz").await, (503, "first list of Peers\n".to_owned()));
        assert_eq!(
            ask(address, "/healthz").await,
            (503, "loop: silent for 0 s\n".to_owned())
        );
        drop(pending);
        let remark = readiness.remark("from the cache");
        assert_eq!(
            ask(address, "/readyz").await,
            (200, "ok\nbut: from the cache\n".to_owned())
        );
        drop((remark, wedged));
        assert_eq!(ask(address, "/readyz").await, (200, "ok\n".to_owned()));
        assert_eq!(ask(address, "/healthz").await, (200, "ok\n".to_owned()));
        assert_eq!(
            ask(address, "/debug/state").await,
            (200, "{\n  \"peers\": 3\n}\n".to_owned())
        );
        let (status, metrics) = ask(address, "/metrics").await;
        assert_eq!((status, metrics.contains("test_build_info")), (200, true), "{metrics}");

        stop.cancel();
        served.await.expect("no panic").expect("ends well");
    }

    /// The address of a served endpoint, the token that stops it, and its task.
    type Served = (
        SocketAddr,
        CancellationToken,
        tokio::task::JoinHandle<anyhow::Result<()>>,
    );

    async fn serving() -> Served {
        serve(Admin::bind(SocketAddr::from(([127, 0, 0, 1], 0))).expect("binds"))
    }

    fn serve(admin: Admin) -> Served {
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
        let (address, stop, served) = serve(Admin::bind(any).expect("binds"));
        for loopback in [Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()] {
            let at = SocketAddr::new(loopback, address.port());
            assert_eq!(ask(at, "/debug/state").await.0, 200, "{at}");
        }
        stop.cancel();
        served.await.expect("no panic").expect("ends well");
    }

    // threat: gateway-port
    #[tokio::test]
    async fn endpoint_bound_to_interfaces_answers_only_there() {
        let any = SocketAddr::from(([0, 0, 0, 0], 0));
        let admin = Admin::bind_to_interfaces(any, ["lo"]).expect("binds");
        let (address, stop, served) = serve(admin);
        let at = SocketAddr::from(([127, 0, 0, 1], address.port()));
        assert_eq!(ask(at, "/healthz").await, (200, "ok\n".to_owned()));
        stop.cancel();
        served.await.expect("no panic").expect("ends well");
        let error = Admin::bind_to_interfaces(at, ["none-such"]).expect_err("there is none such");
        assert!(format!("{error:#}").contains("of interface none-such"), "{error:#}");
    }

    // threat: admin-port-flood
    #[tokio::test]
    async fn idle_connections_beyond_the_limit_are_closed() {
        let (address, stop, served) = serving().await;
        let mut idle = Vec::new();
        for _ in 0..3 * MAX_CONNECTIONS {
            idle.push(TcpStream::connect(address).await.expect("connects"));
        }
        assert_eq!(ask(address, "/healthz").await, (200, "ok\n".to_owned()));
        let ends = |stream: &mut TcpStream| {
            let ended = stream.try_read(&mut [0; 1]);
            !matches!(ended, Err(error) if error.kind() == ErrorKind::WouldBlock)
        };
        for stream in &mut idle[..2 * MAX_CONNECTIONS] {
            stream.readable().await.expect("is closed");
            assert!(ends(stream));
        }
        stop.cancel();
        served.await.expect("no panic").expect("ends well");
    }

    // threat: admin-port-flood
    #[tokio::test(start_paused = true)]
    async fn request_with_an_endless_head_is_closed() {
        let (address, _stop, _served) = serving().await;
        let mut stream = TcpStream::connect(address).await.expect("connects");
        stream
            .write_all(b"GET /healthz HTTP/1.1\r\nhost: x\r\n")
            .await
            .expect("writes");
        let began = tokio::time::Instant::now();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.expect("is closed");
        assert!(
            !answer.contains(" 200 ") && began.elapsed() >= HEADER_TIMEOUT,
            "{answer}"
        );
    }

    // threat: controller-port
    #[tokio::test]
    async fn state_and_closed_metrics_are_shown_only_to_loopback() {
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
            let closed = show_metrics(extract::State(state(Audience::Loopback)), from).await;
            let open = show_metrics(extract::State(state(Audience::Everyone)), from).await;
            for (page, shown, content) in [
                (dump.into_response(), local, "\"peers\": 3"),
                (closed.into_response(), local, "test_build_info"),
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
