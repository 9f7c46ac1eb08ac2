//! Creates the keys, certificates and kubeconfigs of clusters, in memory. Each cluster has its own certificate authority.

use std::net::IpAddr;

use base64::{Engine, engine::general_purpose::STANDARD};
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, SanType,
};

/// A certificate and its private key, both PEM.
#[derive(Debug, Clone)]
pub(crate) struct Pair {
    pub(crate) certificate: String,
    pub(crate) key: String,
}

/// A cluster's certificate authority.
pub(crate) struct Authority {
    certificate: String,
    issuer: Issuer<'static, KeyPair>,
}

impl Authority {
    /// Creates an authority. Also returns its certificate and key, for [`Self::load`].
    pub(crate) fn new(cluster: &str) -> Result<(Self, Pair), rcgen::Error> {
        let key = KeyPair::generate()?;
        let mut params = CertificateParams::default();
        params.distinguished_name = name(&format!("{cluster}-ca"), None);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::DigitalSignature];
        let certificate = params.self_signed(&key)?.pem();
        let pair = Pair {
            certificate: certificate.clone(),
            key: key.serialize_pem(),
        };
        Ok((
            Self {
                certificate,
                issuer: Issuer::new(params, key),
            },
            pair,
        ))
    }

    /// Loads an authority that [`Self::new`] created. `pair` is its certificate and key.
    pub(crate) fn load(cluster: &str, pair: &Pair) -> Result<Self, rcgen::Error> {
        let mut params = CertificateParams::default();
        params.distinguished_name = name(&format!("{cluster}-ca"), None);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::DigitalSignature];
        let issuer = Issuer::new(params, KeyPair::from_pem(&pair.key)?);
        Ok(Self {
            certificate: pair.certificate.clone(),
            issuer,
        })
    }

    /// Creates the API server's certificate, for these DNS names and addresses.
    pub(crate) fn server(&self, names: &[&str], addresses: &[IpAddr]) -> Result<Pair, rcgen::Error> {
        let mut params = CertificateParams::default();
        params.distinguished_name = name("kube-apiserver", None);
        for dns in names {
            params.subject_alt_names.push(SanType::DnsName((*dns).try_into()?));
        }
        params
            .subject_alt_names
            .extend(addresses.iter().map(|address| SanType::IpAddress(*address)));
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        self.sign(params)
    }

    /// Creates a client certificate. The API server authenticates its holder as `user` in `group`.
    pub(crate) fn client(&self, user: &str, group: Option<&str>) -> Result<Pair, rcgen::Error> {
        let mut params = CertificateParams::default();
        params.distinguished_name = name(user, group);
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        self.sign(params)
    }

    /// Creates a kubeconfig for a user of this cluster, with all credentials inline.
    pub(crate) fn kubeconfig(
        &self,
        cluster: &str,
        server: &str,
        user: &str,
        group: Option<&str>,
    ) -> Result<String, rcgen::Error> {
        let pair = self.client(user, group)?;
        let [ca, certificate, key] =
            [&self.certificate, &pair.certificate, &pair.key].map(|pem| STANDARD.encode(pem.as_bytes()));
        Ok(format!(
            "apiVersion: v1\nkind: Config\n\
             clusters:\n- name: {cluster}\n  cluster:\n    server: {server}\n    certificate-authority-data: {ca}\n\
             users:\n- name: {user}\n  user:\n    client-certificate-data: {certificate}\n    client-key-data: {key}\n\
             contexts:\n- name: {user}@{cluster}\n  context: {{cluster: {cluster}, user: {user}}}\n\
             current-context: {user}@{cluster}\n"
        ))
    }

    fn sign(&self, mut params: CertificateParams) -> Result<Pair, rcgen::Error> {
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        let key = KeyPair::generate()?;
        let certificate = params.signed_by(&key, &self.issuer)?.pem();
        Ok(Pair {
            certificate,
            key: key.serialize_pem(),
        })
    }
}

/// Creates a key that signs ServiceAccount tokens, and returns it as PEM: private key, public key.
pub(crate) fn service_account_key() -> Result<(String, String), rcgen::Error> {
    let key = KeyPair::generate()?;
    Ok((key.serialize_pem(), key.public_key_pem()))
}

fn name(common: &str, organisation: Option<&str>) -> DistinguishedName {
    let mut name = DistinguishedName::new();
    if let Some(organisation) = organisation {
        name.push(DnType::OrganizationName, organisation);
    }
    name.push(DnType::CommonName, common);
    name
}
