//! The admin endpoint of a program (`--listen`): `/metrics`, `/healthz`, `/readyz`, `/debug/state`. Read-only; it never
//! shows a secret, since the state it dumps is made by the program without them. The state names who talks to whom, and the
//! endpoint may be bound to every address of a node that strangers reach: it is shown to the loopback alone.

use std::{fmt, net::SocketAddr, sync::Arc};

use anyhow::Context;
use axum::{Router, extract, http::StatusCode, response::IntoResponse, routing::get};
use prometheus_client::registry::Registry;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use crate::{liveness::Liveness, metrics, readiness::Readiness};

/// What the endpoint shows.
#[derive(Clone)]
pub struct State {
    /// `/metrics`.
    pub registry: Arc<Registry>,
    /// `/readyz`: 200 with remarks, or 503 with what is pending, one a line.
    pub readiness: Readiness,
    /// `/healthz`: 200, or 503 with the loops that are silent, one a line.
    pub liveness: Liveness,
    /// `/debug/state`: made anew for each request, without secrets. To others than the loopback: 403.
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
    listener: TcpListener,
}

impl Admin {
    /// Binds the address, so that a taken port fails the start of the program and port 0 becomes known.
    ///
    /// # Errors
    /// The address cannot be bound.
    pub async fn bind(listen: SocketAddr) -> anyhow::Result<Self> {
        let listener = TcpListener::bind(listen).await.with_context(|| {
            format!("cannot listen on {listen} for metrics and health; choose another address with --listen")
        })?;
        Ok(Self { listener })
    }

    /// Where it listens.
    ///
    /// # Errors
    /// The socket has no address (it always has).
    pub fn local_addr(&self) -> std::io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// Serves until the token is cancelled.
    ///
    /// # Errors
    /// The listener failed.
    pub async fn serve(self, state: State, stop: CancellationToken) -> anyhow::Result<()> {
        let routes = Router::new()
            .route("/metrics", get(show_metrics))
            .route("/healthz", get(show_health))
            .route("/readyz", get(show_readiness))
            .route("/debug/state", get(show_state))
            .with_state(state);
        let routes = routes.into_make_service_with_connect_info::<SocketAddr>();
        axum::serve(self.listener, routes)
            .with_graceful_shutdown(stop.cancelled_owned())
            .await?;
        Ok(())
    }
}

async fn show_metrics(extract::State(state): extract::State<State>) -> impl IntoResponse {
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

/// 200 `ok`, or 503 with one line for each thing in the way.
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
    // A socket for both families sees IPv4 in an IPv6 coat.
    if !from.ip().to_canonical().is_loopback() {
        let text = "shown to 127.0.0.1 and ::1 alone: use kubectl port-forward to the pod, kubectl exec where it has a \
                    shell, or curl on the node itself\n";
        return (StatusCode::FORBIDDEN, [("content-type", "text/plain")], text.to_owned());
    }
    (
        StatusCode::OK,
        [("content-type", "application/json")],
        format!("{:#}\n", (state.dump)()),
    )
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    async fn ask(address: SocketAddr, path: &str) -> (u16, String) {
        let mut stream = tokio::net::TcpStream::connect(address).await.expect("connects");
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
    async fn the_endpoint_says_what_is_pending_what_is_wedged_and_what_the_state_is() {
        let readiness = Readiness::new();
        let liveness = Liveness::new();
        let admin = Admin::bind(SocketAddr::from(([127, 0, 0, 1], 0))).await.expect("binds");
        let address = admin.local_addr().expect("has an address");
        let state = State {
            registry: Arc::new(metrics::registry("test", "1")),
            readiness: readiness.clone(),
            liveness: liveness.clone(),
            dump: Arc::new(|| serde_json::json!({"peers": 3})),
        };
        let stop = CancellationToken::new();
        let served = tokio::spawn(admin.serve(state, stop.clone()));

        let (pending, wedged) = (
            readiness.pending("first list of Peers"),
            liveness.watch("loop", std::time::Duration::ZERO),
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

    #[tokio::test]
    async fn the_state_is_shown_to_the_loopback_alone_and_others_are_told_how() {
        let state = State {
            registry: Arc::new(metrics::registry("test", "1")),
            readiness: Readiness::new(),
            liveness: Liveness::new(),
            dump: Arc::new(|| serde_json::json!({"peers": 3})),
        };
        let shown = (200, "{\n  \"peers\": 3\n}\n".to_owned());
        for (from, sees) in [
            ("127.0.0.1:7", true),
            ("[::1]:7", true),
            ("[::ffff:127.0.0.1]:7", true),
            ("192.0.2.7:7", false),
            ("[::ffff:192.0.2.7]:7", false),
            ("[2001:db8::7]:7", false),
        ] {
            let from = extract::ConnectInfo(from.parse::<SocketAddr>().expect("an address"));
            let answer = show_state(extract::State(state.clone()), from).await.into_response();
            let status = answer.status().as_u16();
            let body = axum::body::to_bytes(answer.into_body(), 1000).await.expect("a body");
            let got = (status, String::from_utf8_lossy(&body).into_owned());
            if sees {
                assert_eq!(got, shown, "{from:?}");
            } else {
                assert!(
                    got.0 == 403 && got.1.contains("kubectl port-forward"),
                    "{from:?}: {got:?}"
                );
            }
        }
    }
}
