//! Why an API server answers requests for a kind with 404: the kind may not be served, because its CRD is not installed. The 404 alone
//! does not show this, because a proxy may answer every request with 404 while the API server behind it does not run. The API server's
//! discovery documents show it.

use std::time::Duration;

use kube::{Client, Error, api::ApiResource};

use crate::api_error;

/// Timeout of the requests for the discovery documents of one kind.
const TIMEOUT: Duration = Duration::from_secs(30);

/// Why the answer was 404.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Cause {
    /// The API server does not serve the kind.
    NotServed,
    /// The account may not read the discovery documents (403).
    DiscoveryForbidden,
    /// The discovery documents contain the kind, or are not those of an API server, or cannot be read.
    Unknown,
}

/// Finds the cause in the discovery documents.
pub(super) async fn find_cause(client: &Client, kind: &ApiResource) -> Cause {
    // Every API server serves the kinds of the core group.
    if kind.group.is_empty() {
        return Cause::Unknown;
    }
    let why = match tokio::time::timeout(TIMEOUT, is_served(client, kind)).await {
        Ok(Ok(Some(false))) => return Cause::NotServed,
        Ok(Ok(Some(true))) => "the kind is in the discovery documents".to_owned(),
        Ok(Ok(None)) => "no API server has such discovery documents".to_owned(),
        Ok(Err(Error::Api(status))) if status.code == 403 => return Cause::DiscoveryForbidden,
        Ok(Err(error)) => api_error::sanitize(&error.to_string()),
        Err(_) => api_error::NO_ANSWER.to_owned(),
    };
    tracing::debug!(kind = kind.plural, %why, "404 for an unknown reason");
    Cause::Unknown
}

/// Whether the discovery documents contain the kind. `None` = a document is not from an API server.
async fn is_served(client: &Client, kind: &ApiResource) -> Result<Option<bool>, Error> {
    match client.list_api_group_resources(&kind.api_version).await {
        Ok(document) => {
            let is_real = document.group_version == kind.api_version && !document.resources.is_empty();
            return Ok(is_real.then(|| document.resources.iter().any(|served| served.name == kind.plural)));
        }
        Err(Error::Api(status)) if status.code == 404 => {}
        Err(error) => return Err(error),
    }
    // The 404 for the document may be from a proxy, too. The list of all groups shows whether this group and version are served.
    let document = client.list_api_groups().await?;
    let mut versions = document.groups.iter().flat_map(|group| &group.versions);
    let is_real = !document.groups.is_empty();
    Ok(is_real.then(|| versions.any(|served| served.group_version == kind.api_version)))
}

#[cfg(test)]
mod tests {
    use clustermesh_api::peer::Peer;
    use http::{Request, Response};
    use k8s_openapi::api::core::v1::Node;
    use kube::client::Body;
    use serde_json::{Value, json};

    use super::*;

    const GROUP: &str = "/apis/kilo.squat.ai/v1alpha1";

    /// The cause for the kind Peer at an API server that has these documents (path, status, text), and otherwise answers with 404.
    async fn cause(documents: Vec<(&str, u16, Value)>) -> Cause {
        let documents: Vec<_> = documents
            .into_iter()
            .map(|(path, status, text)| (path.to_owned(), status, text.to_string()))
            .collect();
        let service = tower::service_fn(move |request: Request<Body>| {
            let found = documents.iter().find(|(path, ..)| *path == request.uri().path());
            let (status, text) = found.map_or((404, "default backend - 404"), |(_, status, text)| (*status, text));
            let response = Response::builder().status(status);
            let response = response.body(Body::from(text.as_bytes().to_vec()));
            std::future::ready(Ok::<_, std::convert::Infallible>(response.expect("a response")))
        });
        find_cause(&Client::new(service, "default"), &ApiResource::erase::<Peer>(&())).await
    }

    fn of_group(group_version: &str, kinds: &[&str]) -> Value {
        let resources: Vec<Value> = kinds
            .iter()
            .map(|name| json!({"name": name, "singularName": "", "namespaced": false, "kind": "K", "verbs": []}))
            .collect();
        json!({"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": group_version, "resources": resources})
    }

    fn groups(versions: &[&str]) -> Value {
        let groups: Vec<Value> = versions
            .iter()
            .map(|version| json!({"name": "g", "versions": [{"groupVersion": version, "version": "v"}]}))
            .collect();
        json!({"kind": "APIGroupList", "apiVersion": "v1", "groups": groups})
    }

    #[tokio::test]
    async fn kind_is_not_served_only_if_a_real_document_lacks_it() {
        let own = "kilo.squat.ai/v1alpha1";
        let other = groups(&["apps/v1", "kilo.squat.ai/v1"]);
        for documents in [
            vec![(GROUP, 200, of_group(own, &["peerpolicies"]))],
            vec![("/apis", 200, other.clone())],
        ] {
            assert_eq!(cause(documents.clone()).await, Cause::NotServed, "{documents:?}");
        }
        for documents in [
            // Only a proxy answers.
            vec![],
            vec![(GROUP, 200, of_group(own, &["peerpolicies", "peers"]))],
            vec![("/apis", 200, groups(&["apps/v1", own]))],
            // These documents are not from an API server.
            vec![(GROUP, 200, json!({}))],
            vec![(GROUP, 200, of_group(own, &[]))],
            vec![(GROUP, 200, of_group("apps/v1", &["deployments"]))],
            vec![("/apis", 200, groups(&[]))],
            // The group's document may contain the kind.
            vec![(GROUP, 500, json!({})), ("/apis", 200, other)],
            vec![("/apis", 503, json!({}))],
        ] {
            assert_eq!(cause(documents.clone()).await, Cause::Unknown, "{documents:?}");
        }
        let forbidden = json!({
            "kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 403, "reason": "Forbidden", "message": "",
        });
        for path in [GROUP, "/apis"] {
            let documents = vec![(path, 403, forbidden.clone())];
            assert_eq!(cause(documents).await, Cause::DiscoveryForbidden, "{path}");
        }
    }

    #[tokio::test]
    async fn core_kinds_are_always_served() {
        let service =
            tower::service_fn(|_: Request<Body>| std::future::pending::<Result<Response<Body>, std::io::Error>>());
        let cause = find_cause(&Client::new(service, "default"), &ApiResource::erase::<Node>(&())).await;
        assert_eq!(cause, Cause::Unknown);
    }
}
