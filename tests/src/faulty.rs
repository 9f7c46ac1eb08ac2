//! Runs an https proxy in front of a real API server. With a [`Fault`], the API server behind it looks faulty.

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

use base64::{Engine, engine::general_purpose::STANDARD};
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

/// How an API server misbehaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Fault {
    /// Each response comes after this time.
    Slow(Duration),
    /// The response to each request of this kind is this status.
    Status(Requests, u16),
    /// Each response breaks off in the middle.
    Truncated,
    /// Each response is the beginning of a JSON object, and complete as far as HTTP shows.
    NotJson,
    /// Each response is a list of one object, whose name has about this many bytes.
    Filler(usize),
    /// Each connection is closed.
    Closed,
    /// For every other second, connections are closed.
    Flapping,
    /// The certificate is one of another authority.
    OtherAuthority,
}

/// Kinds of requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Requests {
    All,
    Watches,
    Writes,
    /// Writes of the status of ClusterMeshes.
    Status,
}

impl Requests {
    fn contain(self, request: &http::request::Parts) -> bool {
        let path = request.uri.path();
        let is_write = !matches!(request.method, Method::GET | Method::HEAD);
        match self {
            Self::All => true,
            Self::Watches => request.uri.query().is_some_and(|query| query.contains("watch=true")),
            Self::Writes => is_write,
            Self::Status => is_write && path.contains("/clustermeshes/") && path.ends_with("/status"),
        }
    }
}

impl Fault {
    /// The faults that benchmarks and the soak name.
    pub const NAMED: [(&'static str, Self); 7] = [
        ("slow", Self::Slow(Duration::from_secs(30))),
        ("throttling", Self::Status(Requests::All, 429)),
        ("error", Self::Status(Requests::All, 500)),
        ("truncated", Self::Truncated),
        ("flapping", Self::Flapping),
        ("endless", Self::Filler(usize::MAX)),
        ("conflict", Self::Status(Requests::Writes, 409)),
    ];
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match Self::NAMED.into_iter().find(|(_, fault)| fault == self) {
            Some((name, _)) => f.write_str(name),
            None => write!(f, "{self:?}"),
        }
    }
}

impl std::str::FromStr for Fault {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = Self::NAMED.into_iter().find(|(name, _)| *name == text);
        let names = || Self::NAMED.map(|(name, _)| name).join(", ");
        found
            .map(|(_, fault)| fault)
            .ok_or_else(|| format!("not one of {}", names()))
    }
}

/// A proxy. It has no fault at first.
pub struct FaultyApi {
    fault: watch::Sender<Option<Fault>>,
    address: SocketAddr,
    /// The authority of the certificate, and that of [`Fault::OtherAuthority`], as PEM.
    authorities: [String; 2],
}

/// What serves the connections.
struct Server {
    /// The TLS acceptors for the proxy's certificate, and for the one of [`Fault::OtherAuthority`].
    tls: [TlsAcceptor; 2],
    upstream: Client,
    began: Instant,
}

impl FaultyApi {
    /// Starts a proxy on a host of the lab, in front of the API server of `cluster`. It passes the credentials of its clients on.
    pub async fn start(host: &Machine<'_>, port: u16, cluster: &Cluster<'_>) -> Self {
        let mut config = Kubeconfig::from_yaml(&cluster.kubeconfig().unwrap()).unwrap();
        config.auth_infos[0].auth_info = Some(Default::default());
        let options = KubeConfigOptions::default();
        let config = kube::Config::from_custom_kubeconfig(config, &options).await.unwrap();
        let address = SocketAddr::new(host.address(), port);
        let ((ca, tls), (other_ca, other_tls)) = (https_server::tls(address.ip()), https_server::tls(address.ip()));
        let listener = https_server::listen(host, address);
        let (fault, current) = watch::channel(None);
        let server = Arc::new(Server {
            tls: [tls, other_tls],
            upstream: Client::try_from(config).unwrap(),
            began: Instant::now(),
        });
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let (server, current) = (Arc::clone(&server), current.clone());
                tokio::spawn(async move { server.serve(stream, current).await });
            }
        });
        Self {
            fault,
            address,
            authorities: [ca, other_ca],
        }
    }

    /// Sets or ends the fault, and closes all connections, so that open watches do not outlive a change.
    pub fn set(&self, fault: Option<Fault>) {
        self.fault.send_replace(fault);
    }

    /// Replaces the server of a kubeconfig with this proxy.
    pub fn kubeconfig(&self, kubeconfig: &str) -> String {
        self.kubeconfig_with(kubeconfig, &self.authorities[0])
    }

    /// Like [`Self::kubeconfig`], with the authority of [`Fault::OtherAuthority`].
    pub fn kubeconfig_with_other_authority(&self, kubeconfig: &str) -> String {
        self.kubeconfig_with(kubeconfig, &self.authorities[1])
    }

    fn kubeconfig_with(&self, kubeconfig: &str, ca: &str) -> String {
        let mut kubeconfig = Kubeconfig::from_yaml(kubeconfig).unwrap();
        let cluster = kubeconfig.clusters[0].cluster.as_mut().unwrap();
        cluster.server = Some(format!("https://{}", self.address));
        cluster.certificate_authority_data = Some(STANDARD.encode(ca));
        serde_json::to_string(&kubeconfig).unwrap()
    }
}

impl Server {
    /// Serves one connection until it ends or the fault changes.
    async fn serve(&self, stream: TcpStream, mut current: watch::Receiver<Option<Fault>>) {
        let fault = *current.borrow_and_update();
        let seconds = self.began.elapsed().as_secs();
        let is_closed = match fault {
            Some(Fault::Closed) => true,
            Some(Fault::Flapping) => seconds % 2 == 1,
            _ => false,
        };
        if is_closed {
            return;
        }
        let flap = async {
            match fault {
                Some(Fault::Flapping) => {
                    tokio::time::sleep_until(self.began + Duration::from_secs(seconds + 1)).await;
                }
                _ => std::future::pending().await,
            }
        };
        let connection = async {
            let tls = &self.tls[usize::from(fault == Some(Fault::OtherAuthority))];
            let Ok(stream) = tls.accept(stream).await else { return };
            let answer = service_fn(|request| answer(request, fault, &self.upstream));
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
}

async fn answer(
    request: Request<Incoming>,
    fault: Option<Fault>,
    upstream: &Client,
) -> Result<Response<ProxyBody>, Infallible> {
    let (head, body) = request.into_parts();
    let list = r#"{"apiVersion":"v1","kind":"List","metadata":{"resourceVersion":"1"},"items":["#;
    Ok(match fault {
        Some(Fault::Status(requests, code)) if requests.contain(&head) => status(code),
        Some(Fault::NotJson) => respond(200, ProxyBody::Whole(Body::from(list.as_bytes()[..60].to_vec()))),
        Some(Fault::Filler(left)) => respond(
            200,
            ProxyBody::Filler {
                begin: Some(format!(r#"{list}{{"metadata":{{"name":""#)),
                left,
            },
        ),
        Some(Fault::Truncated) => {
            let response = forward(head, body, upstream).await;
            response.map(|body| ProxyBody::Truncated { body, is_over: false })
        }
        fault => {
            if let Some(Fault::Slow(delay)) = fault {
                tokio::time::sleep(delay).await;
            }
            forward(head, body, upstream).await.map(ProxyBody::Whole)
        }
    })
}

fn respond(code: u16, body: ProxyBody) -> Response<ProxyBody> {
    let mut response = Response::new(body);
    *response.status_mut() = StatusCode::from_u16(code).unwrap();
    let json = header::HeaderValue::from_static("application/json");
    response.headers_mut().insert(header::CONTENT_TYPE, json);
    response
}

fn status(code: u16) -> Response<ProxyBody> {
    let name = StatusCode::from_u16(code)
        .unwrap()
        .canonical_reason()
        .unwrap_or_default();
    let text = json!({
        "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "message": "a fault of the test",
        "reason": name.replace(' ', ""), "code": code,
    });
    respond(code, ProxyBody::Whole(Body::from(text.to_string().into_bytes())))
}

/// Passes a request on. Without a response of the API server, the response is 502.
async fn forward(mut head: http::request::Parts, mut incoming: Incoming, upstream: &Client) -> Response<Body> {
    let mut body = BytesMut::new();
    while let Some(Ok(frame)) = poll_fn(|cx| Pin::new(&mut incoming).poll_frame(cx)).await {
        if let Some(data) = frame.data_ref() {
            body.extend_from_slice(data);
        }
    }
    // `upstream` sets its own values of these headers.
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
    /// See [`Fault::Filler`]. `begin` is sent first, then `left` bytes, then the end of the list.
    Filler {
        begin: Option<String>,
        left: usize,
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
            Self::Filler { begin, left } => {
                let filler = &[b'x'; 16 * 1024];
                let data = match begin.take() {
                    Some(begin) => Bytes::from(begin),
                    None if *left == 0 => return Poll::Ready(None),
                    None if *left <= filler.len() => {
                        *left = 0;
                        Bytes::from_static(b"\"}}]}")
                    }
                    None => {
                        *left -= filler.len();
                        Bytes::from_static(filler)
                    }
                };
                Poll::Ready(Some(Ok(Frame::data(data))))
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
