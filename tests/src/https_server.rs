//! Serves https in the network namespace of a host of the lab, with a certificate of an authority of its own.

use std::{
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use base64::{Engine, engine::general_purpose::STANDARD};
use clustermesh_lab::Node as Machine;
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, SanType,
};
use tokio::net::TcpListener;
use tokio_rustls::{TlsAcceptor, rustls};

/// The certificate of an authority, and a TLS acceptor whose certificate for `address` this authority signed.
pub fn tls(address: IpAddr) -> (String, TlsAcceptor) {
    let name = |common: &str| {
        let mut name = DistinguishedName::new();
        name.push(DnType::CommonName, common);
        name
    };
    let (ca_key, key) = (KeyPair::generate().unwrap(), KeyPair::generate().unwrap());
    let mut ca = CertificateParams::default();
    ca.distinguished_name = name("test-ca");
    ca.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    ca.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::DigitalSignature];
    let ca_certificate = ca.self_signed(&ca_key).unwrap();
    let mut server = CertificateParams::default();
    server.distinguished_name = name("test-server");
    server.subject_alt_names = vec![SanType::IpAddress(address)];
    server.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    let certificate = server.signed_by(&key, &Issuer::new(ca, ca_key)).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = rustls::ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(
            vec![certificate.der().clone()],
            rustls::pki_types::PrivateKeyDer::try_from(key.serialize_der()).unwrap(),
        )
        .unwrap();
    (ca_certificate.pem(), TlsAcceptor::from(Arc::new(config)))
}

/// Listens in the network namespace of a host of the lab.
pub fn listen(host: &Machine<'_>, address: SocketAddr) -> TcpListener {
    let netns = std::fs::File::open(host.netns()).unwrap();
    // A separate thread enters the namespace. The socket stays in the namespace in which it was created.
    let listener = std::thread::spawn(move || {
        nix::sched::setns(netns, nix::sched::CloneFlags::CLONE_NEWNET).unwrap();
        std::net::TcpListener::bind(address).unwrap()
    });
    let listener = listener.join().unwrap();
    listener.set_nonblocking(true).unwrap();
    TcpListener::from_std(listener).unwrap()
}

/// A kubeconfig for a server whose certificate `ca` has signed.
pub fn kubeconfig(address: SocketAddr, ca: &str, token: &str) -> String {
    let ca = STANDARD.encode(ca);
    format!(
        "apiVersion: v1\nkind: Config\ncurrent-context: c\ncontexts:\n- name: c\n  context: {{cluster: k, user: u}}\n\
         clusters:\n- name: k\n  cluster:\n    server: https://{address}\n    certificate-authority-data: {ca}\n\
         users:\n- name: u\n  user:\n    token: {token}\n"
    )
}
