//! Compares the responses of an API server that has this project's Peer CRD with recorded ones for Kilo's own CRD.

use crate::api_server::ApiServer;
use clustermesh_api::peer::PeerSpec;
use serde::Deserialize;
use serde_json::Value;

const PEERS: &str = "/apis/kilo.squat.ai/v1alpha1/peers";

#[derive(Deserialize)]
struct Recorded {
    case: String,
    strict: bool,
    result: String,
    message: Option<String>,
    stored_spec: Option<Value>,
    sent: Value,
}

#[tokio::test]
async fn peer_crd_validates_like_kilos_and_peer_spec_loses_no_field() {
    let recorded: Vec<Recorded> = include_str!("peer.jsonl")
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert_eq!(recorded.len(), 54);
    let server = ApiServer::start().await;
    let mut differences = Vec::new();
    for recorded in recorded {
        let validation = if recorded.strict { "Strict" } else { "Ignore" };
        let answer = server
            .post(
                &format!("{PEERS}?dryRun=All&fieldValidation={validation}"),
                &recorded.sent,
            )
            .await;
        let (result, message, stored) = match answer {
            Ok(object) => ("accepted".to_owned(), None, Some(object["spec"].clone())),
            Err((code, message)) => (format!("rejected {code}"), Some(message), None),
        };
        // The recording contains only the first 400 characters of a message.
        let message = message.map(|text| text.chars().take(400).collect::<String>());
        if (&result, &stored, &message) != (&recorded.result, &recorded.stored_spec, &recorded.message) {
            differences.push(format!("{}: {result}: {message:?}: {stored:?}", recorded.case));
        }
        if let Some(stored) = stored {
            let typed: PeerSpec =
                serde_json::from_value(stored.clone()).unwrap_or_else(|e| panic!("{}: {e}", recorded.case));
            assert_eq!(serde_json::to_value(typed).unwrap(), stored, "{}", recorded.case);
        }
    }
    assert_eq!(differences, Vec::<String>::new());
}
