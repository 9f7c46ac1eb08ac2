//! Runs an https proxy in front of a member's API server. With a [`Fault`], the API server behind it looks faulty.

use std::{
    convert::Infallible,
    fmt,
    future::poll_fn,
    net::SocketAddr,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use bytes::{Bytes, BytesMut};
use clustermesh_lab::{Cluster, Node as Machine};
use http::{Method, Request, Response, StatusCode, header};
use http_body::{Body as _, Frame};
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::TokioIo;
use kube::{Client, client::Body, config::KubeConfigOptions, config::Kubeconfig};
use serde_json::json;
use tokio::{net::TcpStream, sync::watch, time::Instant};
use tokio_rustls::TlsAcceptor;

use crate::https_server;

/// How long [`Fault::Slow`] delays a response.
const DELAY: Duration = Duration::from_secs(30);

/// How an API server misbehaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Fault {
    /// Each response comes after 30 s.
    Slow,
    /// Each response is 429 (too many requests).
    Throttling,
    /// Each response is 500.
    Error,
    /// Each response ends in the middle.
    Truncated,
    /// Each response is a list that never ends.
    Endless,
    /// For every other second, connections are closed.
    Flapping,
    /// Each write is refused with 409 (conflict).
    Conflict,
}

impl Fault {
    pub const ALL: [Self; 7] = [
        Self::Slow,
        Self::Throttling,
        Self::Error,
        Self::Truncated,
        Self::Flapping,
        Self::Endless,
        Self::Conflict,
    ];
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&format!("{self:?}").to_lowercase())
    }
}

impl std::str::FromStr for Fault {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let names = Self::ALL.map(|fault| fault.to_string()).join(", ");
        let found = Self::ALL.into_iter().find(|fault| fault.to_string() == text);
        found.ok_or_else(|| format!("not one of {names}"))
    }
}

/// A proxy. It has no fault at first.
pub struct MemberProxy {
    fault: watch::Sender<Option<Fault>>,
    address: SocketAddr,
    ca: String,
}

impl MemberProxy {
    /// Starts a proxy for `member` that listens at `address` of `host`. It passes the credentials of its clients on.
    pub async fn start(host: &Machine<'_>, address: SocketAddr, member: &Cluster<'_>) -> Self {
        let mut config = Kubeconfig::from_yaml(&member.kubeconfig().unwrap()).unwrap();
        config.auth_infos[0].auth_info = Some(Default::default());
        let options = KubeConfigOptions::default();
        let config = kube::Config::from_custom_kubeconfig(config, &options).await.unwrap();
        let upstream = Client::try_from(config).unwrap();
        let (ca, tls) = https_server::tls(address.ip());
        let listener = https_server::listen(host, address);
        let (fault, current) = watch::channel(None);
        let epoch = Instant::now();
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(serve(stream, tls.clone(), upstream.clone(), current.clone(), epoch));
            }
        });
        Self { fault, address, ca }
    }

    /// Sets or ends the fault, and closes all connections, so that open watches do not outlive a change.
    pub fn set_fault(&self, fault: Option<Fault>) {
        self.fault.send_replace(fault);
    }

    /// A kubeconfig for the member through this proxy.
    pub fn kubeconfig(&self, token: &str) -> String {
        https_server::kubeconfig(self.address, &self.ca, token)
    }
}

/// Serves one connection until it ends or the fault changes.
async fn serve(
    stream: TcpStream,
    tls: TlsAcceptor,
    upstream: Client,
    mut current: watch::Receiver<Option<Fault>>,
    epoch: Instant,
) {
    let fault = *current.borrow_and_update();
    let seconds = epoch.elapsed().as_secs();
    if fault == Some(Fault::Flapping) && seconds % 2 == 1 {
        return;
    }
    let flap = async {
        match fault {
            Some(Fault::Flapping) => tokio::time::sleep_until(epoch + Duration::from_secs(seconds + 1)).await,
            _ => std::future::pending().await,
        }
    };
    let connection = async {
        let Ok(stream) = tls.accept(stream).await else { return };
        let answer = service_fn(|request| answer(request, fault, upstream.clone()));
        let served = http1::Builder::new().serve_connection(TokioIo::new(stream), answer);
        // A client that closes the connection is no error of the proxy.
        let _ = served.await;
    };
    tokio::select! {
        () = connection => {}
        () = flap => {}
        _ = current.changed() => {}
    }
}

async fn answer(
    request: Request<Incoming>,
    fault: Option<Fault>,
    upstream: Client,
) -> Result<Response<ProxyBody>, Infallible> {
    let is_write = !matches!(*request.method(), Method::GET | Method::HEAD);
    Ok(match fault {
        Some(Fault::Throttling) => status(StatusCode::TOO_MANY_REQUESTS),
        Some(Fault::Error) => status(StatusCode::INTERNAL_SERVER_ERROR),
        Some(Fault::Conflict) if is_write => status(StatusCode::CONFLICT),
        Some(Fault::Endless) => Response::new(ProxyBody::Endless { has_begun: false }),
        Some(Fault::Slow) => {
            tokio::time::sleep(DELAY).await;
            forward(request, &upstream).await.map(ProxyBody::Whole)
        }
        Some(Fault::Truncated) => forward(request, &upstream)
            .await
            .map(|body| ProxyBody::Truncated { body, is_over: false }),
        Some(Fault::Flapping | Fault::Conflict) | None => forward(request, &upstream).await.map(ProxyBody::Whole),
    })
}

fn status(code: StatusCode) -> Response<ProxyBody> {
    let text = json!({
        "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "message": "a fault of the test",
        "reason": code.canonical_reason().unwrap_or_default().replace(' ', ""), "code": code.as_u16(),
    });
    let mut response = Response::new(ProxyBody::Whole(Body::from(text.to_string().into_bytes())));
    *response.status_mut() = code;
    let json = header::HeaderValue::from_static("application/json");
    response.headers_mut().insert(header::CONTENT_TYPE, json);
    response
}

/// Passes a request on. Without a response of the API server, the response is 502.
async fn forward(request: Request<Incoming>, upstream: &Client) -> Response<Body> {
    let (mut head, mut incoming) = request.into_parts();
    let mut body = BytesMut::new();
    while let Some(Ok(frame)) = poll_fn(|cx| Pin::new(&mut incoming).poll_frame(cx)).await {
        if let Some(data) = frame.data_ref() {
            body.extend_from_slice(data);
        }
    }
    // The client adds its own.
    for name in [
        header::HOST,
        header::CONTENT_LENGTH,
        header::CONNECTION,
        header::TRANSFER_ENCODING,
    ] {
        head.headers.remove(name);
    }
    match upstream
        .send(Request::from_parts(head, Body::from(body.freeze())))
        .await
    {
        Ok(response) => response,
        Err(_) => {
            let mut response = Response::new(Body::empty());
            *response.status_mut() = StatusCode::BAD_GATEWAY;
            response
        }
    }
}

/// The body of a response.
enum ProxyBody {
    Whole(Body),
    /// Ends with an error in the middle of the first part.
    Truncated {
        body: Body,
        is_over: bool,
    },
    /// A list of Nodes in which one name never ends.
    Endless {
        has_begun: bool,
    },
}

impl http_body::Body for ProxyBody {
    type Data = Bytes;
    type Error = Arc<dyn std::error::Error + Send + Sync>;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        match &mut *self {
            Self::Whole(body) => {
                let frame = Pin::new(body).poll_frame(cx);
                frame.map(|frame| frame.map(|frame| frame.map_err(|error| Arc::new(error) as Self::Error)))
            }
            Self::Truncated { is_over: true, .. } => {
                Poll::Ready(Some(Err(Arc::new(std::io::Error::other("truncated")))))
            }
            Self::Truncated { body, is_over } => Pin::new(body).poll_frame(cx).map(|frame| {
                *is_over = true;
                let data = frame?.ok()?.into_data().ok()?;
                Some(Ok(Frame::data(data.slice(..data.len() / 2))))
            }),
            Self::Endless { has_begun } => {
                let list = r#"{"apiVersion":"v1","kind":"NodeList","metadata":{"resourceVersion":"1"},"items":[{"metadata":{"name":""#;
                let text = if std::mem::replace(has_begun, true) {
                    Bytes::from_static(&[b'x'; 16 * 1024])
                } else {
                    Bytes::from_static(list.as_bytes())
                };
                Poll::Ready(Some(Ok(Frame::data(text))))
            }
        }
    }

    fn size_hint(&self) -> http_body::SizeHint {
        match self {
            Self::Whole(body) => body.size_hint(),
            _ => http_body::SizeHint::default(),
        }
    }
}
