use std::{
    convert::Infallible,
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use futures::{StreamExt, TryStreamExt};
use k8s_openapi::api::core::v1::Node;
use kube::{
    Api, Client,
    api::{ListParams, WatchParams},
};

use super::*;
use crate::memory::Memory;

const MIB: usize = 1024 * 1024;

/// An endless body.
#[derive(Clone)]
struct Endless {
    chunk: Bytes,
    read: Arc<AtomicUsize>,
}

impl Body for Endless {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let read = self.read.fetch_add(self.chunk.len(), Ordering::Relaxed);
        assert!(read < 64 * MIB, "the endless body is still read");
        Poll::Ready(Some(Ok(Frame::data(self.chunk.clone()))))
    }
}

/// Returns a client of a server that responds with `status` and repeats `text` endlessly, and the number of bytes read from it.
fn endless(status: u16, text: &str, account: &Account) -> (Client, Arc<AtomicUsize>) {
    let read = Arc::new(AtomicUsize::new(0));
    let body = Endless {
        chunk: Bytes::from(text.repeat(1 + 16 * 1024 / text.len())),
        read: Arc::clone(&read),
    };
    let server = tower::service_fn(move |_: Request<RequestBody>| {
        let answer = Response::builder().status(status).body(body.clone());
        std::future::ready(answer.map_err(BoxError::from))
    });
    (
        Client::new(BoundLayer::new(account.clone()).layer(server), "default"),
        read,
    )
}

/// Returns, for each kind of request, the limit that the response exceeds and the number of MiB that were read.
async fn verdicts(status: u16, text: &str) -> Vec<(Option<OverBudget>, usize)> {
    let account = Account::standalone(64 * MIB);
    let mut verdicts = Vec::new();
    for kind in ["list", "watch", "version"] {
        let (client, read) = endless(status, text, &account);
        let nodes: Api<Node> = Api::all(client.clone());
        let error = match kind {
            "list" => nodes.list(&ListParams::default()).await.map(drop).unwrap_err(),
            "watch" => match nodes.watch(&WatchParams::default(), "1").await {
                Err(error) => error,
                Ok(events) => pin!(events).try_next().await.map(drop).unwrap_err(),
            },
            _ => client.apiserver_version().await.map(drop).unwrap_err(),
        };
        verdicts.push((over_budget(&error), read.load(Ordering::Relaxed) / MIB));
    }
    assert_eq!(account.used(), 0, "bytes are still charged after the requests ended");
    verdicts
}

// threat: endless-answer
#[tokio::test]
async fn endless_answer_of_every_kind_is_cut_at_its_limit() {
    let long = "x".repeat(1000);
    let (answer, event) = (OverBudget::Response(MAX_RESPONSE), OverBudget::Event(MAX_RESPONSE));
    let expected = |watch| [(Some(answer), 4), (Some(watch), 4), (Some(answer), 4)];
    assert_eq!(verdicts(200, &long).await, expected(event));
    // The body of an error has the limit of a whole response, even if the request was a watch.
    assert_eq!(verdicts(500, &long).await, expected(answer));
}

// threat: endless-answer
#[tokio::test]
async fn short_text_of_many_values_is_cut_before_it_is_parsed() {
    let values = OverBudget::Values(MAX_PARSED);
    for text in [r#"{"":0},"#, "[0],", "0,"] {
        for (found, read) in verdicts(200, text).await {
            assert_eq!(found, Some(values), "{text}");
            assert!(read < 1, "{read} MiB of {text}");
        }
    }
}

#[tokio::test]
async fn watch_with_many_short_lines_is_not_limited() {
    let account = Account::standalone(64 * MIB);
    let line = r#"{"type":"BOOKMARK","object":{"apiVersion":"v1","kind":"Node","metadata":{"resourceVersion":"7"}}}"#;
    let (client, read) = endless(200, &format!("{line}\n"), &account);
    let nodes: Api<Node> = Api::all(client);
    let events = nodes.watch(&WatchParams::default(), "1").await.unwrap();
    let taken = events
        .take(200_000)
        .try_fold(0, |count, _| std::future::ready(Ok(count + 1)));
    assert_eq!(taken.await.unwrap(), 200_000);
    assert!(read.load(Ordering::Relaxed) > 4 * MAX_RESPONSE);
}

#[tokio::test]
async fn answer_in_flight_counts_against_the_members_memory() {
    let memory = Memory::new(8 * MIB, |_, _| {});
    let (hostile, honest) = (memory.account("hostile"), memory.account("honest"));
    let (client, read) = endless(200, "x", &hostile);
    let error = client.apiserver_version().await.unwrap_err();
    // A member may use half of the memory.
    assert_eq!(over_budget(&error), Some(OverBudget::Member(4 * MIB)));
    // The account is charged more than the bytes read: kube holds up to [`COPIES`] copies of them.
    assert!(read.load(Ordering::Relaxed) < 2 * MIB);
    assert_eq!((hostile.used(), honest.charge().set(4 * MIB)), (0, Ok(())));
}

#[test]
fn weight_covers_parsed_values_and_counts_strings_as_text() {
    // An array, the number of its elements, and the minimum memory of each element. 632 bytes = the B-tree leaf of a map of one entry. A
    // non-empty array has room for at least four values. 4 + 24 bytes = the text of a string and its `String`.
    for (text, elements, least) in [
        (r#"[{"a":0},{"b":0}]"#, 2, 632),
        ("[[0],[0],[0]]", 3, 4 * size_of::<serde_json::Value>()),
        ("[0,0,0,0]", 4, size_of::<serde_json::Value>()),
        (r#"["aaaa","bbbb"]"#, 2, 4 + 24),
    ] {
        let mut weight = Weight::default();
        text.bytes().for_each(|byte| weight.add(byte));
        assert!(weight.bytes >= elements * least, "{text}: {}", weight.bytes);
    }
    // The opening quote weighs `STRING`, and each of the 15 bytes after it 1: an escaped quote does not end the string, and its brackets
    // and commas are text.
    let mut escaped = Weight::default();
    r#""\"{{{{[[[[,,,,""#.bytes().for_each(|byte| escaped.add(byte));
    assert_eq!((escaped.bytes, escaped.in_string), (Weight::STRING + 15, false));
}
