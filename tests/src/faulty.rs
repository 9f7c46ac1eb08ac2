//! A TLS proxy in front of a real API server. A test makes it misbehave at run time.

use std::{
    io,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use base64::{Engine, engine::general_purpose::STANDARD};
use clustermesh_lab::{Cluster, Node as Machine};
use kube::config::Kubeconfig;
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    sync::watch,
};
use tokio_rustls::{TlsAcceptor, TlsConnector, rustls};

use crate::https_server;

/// What the proxy does instead of forwarding a request and its response.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    None,
    /// Forwards each request after this time.
    Delay(Duration),
    /// Answers requests of this kind with this status.
    Status(Requests, u16),
    /// Answers with the beginning of a JSON object.
    Truncated,
    /// Answers with a list that contains one text of this many bytes.
    Filler(usize),
    /// Closes each connection.
    Closed,
    /// Presents a certificate of another authority.
    OtherAuthority,
}

/// Kinds of requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Requests {
    All,
    Watches,
    Writes,
    /// Writes of the status of ClusterMeshes.
    Status,
}

impl Requests {
    fn contain(self, method: &str, path: &str) -> bool {
        match self {
            Self::All => true,
            Self::Watches => path.contains("watch=true"),
            Self::Writes => method != "GET",
            Self::Status => method != "GET" && path.contains("/clustermeshes/") && path.contains("/status"),
        }
    }
}

/// A certificate authority, and the TLS acceptor of a server whose certificate it signed.
struct ServerTls {
    /// The authority's certificate as PEM.
    ca: String,
    acceptor: TlsAcceptor,
}

impl ServerTls {
    fn new(address: std::net::IpAddr) -> Self {
        let (ca, acceptor) = https_server::tls(address);
        Self { ca, acceptor }
    }
}

/// Reads the head of an HTTP request.
async fn read_head(stream: &mut (impl AsyncRead + Unpin)) -> io::Result<String> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(stream.read_u8().await?);
    }
    Ok(String::from_utf8_lossy(&head).into_owned())
}

/// The proxy. It serves one request for each connection.
pub struct FaultyApi {
    address: SocketAddr,
    shared: Arc<Shared>,
}

struct Shared {
    fault: watch::Sender<Fault>,
    tls: ServerTls,
    other: ServerTls,
    /// Where the API server listens on this machine, and a connector that trusts its authority.
    upstream: SocketAddr,
    connector: TlsConnector,
    connections: AtomicUsize,
}

impl FaultyApi {
    /// Listens on a host of the lab, and forwards to the API server of `cluster`.
    pub fn start(host: &Machine<'_>, port: u16, cluster: &Cluster<'_>) -> Self {
        let address = SocketAddr::new(host.address(), port);
        let listener = https_server::listen(host, address);
        let upstream = Kubeconfig::from_yaml(&cluster.kubeconfig().unwrap()).unwrap();
        let upstream = upstream.clusters[0].cluster.clone().unwrap();
        let ca = STANDARD.decode(upstream.certificate_authority_data.unwrap()).unwrap();
        let mut roots = rustls::RootCertStore::empty();
        for certificate in
            <rustls::pki_types::CertificateDer<'_> as rustls::pki_types::pem::PemObject>::pem_slice_iter(&ca)
        {
            roots.add(certificate.unwrap()).unwrap();
        }
        let config = rustls::ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth();
        let shared = Arc::new(Shared {
            fault: watch::Sender::new(Fault::None),
            tls: ServerTls::new(address.ip()),
            other: ServerTls::new(address.ip()),
            upstream: upstream.server.unwrap().trim_start_matches("https://").parse().unwrap(),
            connector: TlsConnector::from(Arc::new(config)),
            connections: AtomicUsize::new(0),
        });
        let serving = Arc::clone(&shared);
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                serving.connections.fetch_add(1, Ordering::Relaxed);
                let shared = Arc::clone(&serving);
                tokio::spawn(async move { shared.serve(stream).await });
            }
        });
        Self { address, shared }
    }

    /// Changes the fault, and closes all connections.
    pub fn set(&self, fault: Fault) {
        self.shared.fault.send_replace(fault);
    }

    /// The number of connections since the start.
    pub fn connections(&self) -> usize {
        self.shared.connections.load(Ordering::Relaxed)
    }

    /// Replaces the server of a kubeconfig with this proxy.
    pub fn kubeconfig(&self, kubeconfig: &str) -> String {
        self.kubeconfig_with(kubeconfig, &self.shared.tls)
    }

    /// Like [`Self::kubeconfig`], with the authority of [`Fault::OtherAuthority`].
    pub fn kubeconfig_with_other_authority(&self, kubeconfig: &str) -> String {
        self.kubeconfig_with(kubeconfig, &self.shared.other)
    }

    fn kubeconfig_with(&self, kubeconfig: &str, tls: &ServerTls) -> String {
        let mut kubeconfig = Kubeconfig::from_yaml(kubeconfig).unwrap();
        let cluster = kubeconfig.clusters[0].cluster.as_mut().unwrap();
        cluster.server = Some(format!("https://{}", self.address));
        cluster.certificate_authority_data = Some(STANDARD.encode(&tls.ca));
        serde_json::to_string(&kubeconfig).unwrap()
    }
}

impl Shared {
    async fn serve(&self, stream: TcpStream) -> io::Result<()> {
        let mut changes = self.fault.subscribe();
        let fault = *changes.borrow_and_update();
        tokio::select! {
            served = self.answer(stream, fault) => served,
            _ = changes.changed() => Ok(()),
        }
    }

    async fn answer(&self, stream: TcpStream, fault: Fault) -> io::Result<()> {
        let tls = match fault {
            Fault::Closed => return Ok(()),
            Fault::OtherAuthority => &self.other,
            _ => &self.tls,
        };
        let mut stream = tls.acceptor.accept(stream).await?;
        let head = read_head(&mut stream).await?;
        let lower = head.to_ascii_lowercase();
        let length = lower.lines().find_map(|line| line.strip_prefix("content-length:"));
        let mut body = vec![0; length.map_or(0, |length| length.trim().parse().unwrap())];
        stream.read_exact(&mut body).await?;
        let mut words = head.split(' ');
        let (method, path) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
        let list = r#"{"apiVersion":"v1","kind":"List","metadata":{"resourceVersion":"1"},"items":["#;
        match fault {
            Fault::Status(requests, code) if requests.contain(method, path) => {
                let status = serde_json::json!({
                    "kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "message": "of the proxy",
                });
                stream.write_all(&begin(code, &status.to_string())).await?;
            }
            Fault::Truncated => stream.write_all(&begin(200, &list[..60])).await?,
            Fault::Filler(length) => {
                let filler = [b'x'; 16 * 1024];
                stream
                    .write_all(&begin(200, &format!("{list}{{\"metadata\":{{\"name\":\"")))
                    .await?;
                for _ in 0..length / filler.len() {
                    stream.write_all(&filler).await?;
                }
                stream.write_all(b"\"}}]}").await?;
            }
            fault => {
                if let Fault::Delay(delay) = fault {
                    tokio::time::sleep(delay).await;
                }
                return self.forward(stream, &head, &body).await;
            }
        }
        stream.shutdown().await
    }

    async fn forward(
        &self,
        client: tokio_rustls::server::TlsStream<TcpStream>,
        head: &str,
        body: &[u8],
    ) -> io::Result<()> {
        let tcp = TcpStream::connect(self.upstream).await?;
        tcp.set_nodelay(true)?;
        let mut server = self.connector.connect(self.upstream.ip().into(), tcp).await?;
        let (request, headers) = head.split_once("\r\n").unwrap();
        server
            .write_all(format!("{request}\r\nConnection: close\r\n{headers}").as_bytes())
            .await?;
        server.write_all(body).await?;
        server.flush().await?;
        let (mut from_client, mut to_client) = tokio::io::split(client);
        tokio::select! {
            // An error here is the end of either connection.
            _ = tokio::io::copy(&mut server, &mut to_client) => {}
            _ = from_client.read_u8() => {}
        }
        to_client.shutdown().await
    }
}

/// The head of a response that ends with its connection, and the beginning of its body.
fn begin(code: u16, body: &str) -> Vec<u8> {
    format!("HTTP/1.1 {code} X\r\ncontent-type: application/json\r\nconnection: close\r\n\r\n{body}").into_bytes()
}
