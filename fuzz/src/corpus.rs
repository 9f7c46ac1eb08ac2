//! Runs the fuzz targets on a stable compiler: every input of fuzz/corpus, and some thousand mutations of them. A panic
//! prints the input. `FUZZ_SEED=N` and `FUZZ_ROUNDS=N` change the mutations; equal seeds give equal inputs.

use std::{
    fs,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    path::Path,
};

use serde_json::Value;

use crate::{objects, packets};

const ROUNDS: u64 = 4_000;
/// Rounds of the targets that begin with a handshake.
const SESSIONS: u64 = 1_000;
/// Tokens that often break parsers.
const TOKENS: [&[u8]; 16] = [
    b"0.0.0.0/0",
    b"::/0",
    b"/33",
    b"-1",
    b"0",
    b"65536",
    b"18446744073709551616",
    b"1e400",
    b"null",
    b"[]",
    b"{}",
    b"\"",
    b"\xc3\xa9",
    b"::ffff:10.0.0.1",
    b"%eth0",
    b"\\u0000",
];

/// Xorshift: random enough, and the same on every machine.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % bound.max(1) as u64) as usize
    }

    /// A JSON document with some values changed: mutated bytes are hardly ever valid JSON.
    fn near_json(&mut self, corpus: &[Vec<u8>]) -> Option<Vec<u8>> {
        let any = |random: &mut Self| serde_json::from_slice::<Value>(&corpus[random.below(corpus.len())]).ok();
        let mut value = any(self)?;
        for _ in 0..=self.below(3) {
            let mut other = any(self)?;
            let (at, from) = (self.below(leaves(&value)), self.below(leaves(&other)));
            let token = String::from_utf8_lossy(TOKENS[self.below(TOKENS.len())]);
            let place = leaf(&mut value, &mut { at })?;
            *place = match self.below(4) {
                0 => token.into(),
                1 => self.below(70_000).into(),
                2 => place
                    .as_str()
                    .map_or(Value::Null, |text| format!("{text}{token}").into()),
                _ => leaf(&mut other, &mut { from })?.take(),
            };
        }
        serde_json::to_vec(&value).ok()
    }

    /// A mutation: a few small changes of one input, with parts of another.
    fn near(&mut self, corpus: &[Vec<u8>]) -> Vec<u8> {
        if self.below(4) > 0
            && let Some(changed) = self.near_json(corpus)
        {
            return changed;
        }
        let mut bytes = corpus[self.below(corpus.len())].clone();
        for _ in 0..=self.below(4) {
            let at = self.below(bytes.len() + 1);
            let end = (at + self.below(24)).min(bytes.len());
            match self.below(6) {
                0 if at < bytes.len() => bytes[at] ^= 1 << self.below(8),
                1 if at < bytes.len() => bytes[at] = self.below(256) as u8,
                2 => drop(bytes.drain(at..end)),
                3 => drop(bytes.splice(at..end, TOKENS[self.below(TOKENS.len())].iter().copied())),
                4 => {
                    let other = &corpus[self.below(corpus.len())];
                    let from = self.below(other.len());
                    let piece = &other[from..(from + self.below(64)).min(other.len())];
                    drop(bytes.splice(at..at, piece.iter().copied()));
                }
                _ => bytes.truncate(bytes.len() - bytes.len() / 8 * self.below(2)),
            }
        }
        bytes
    }
}

/// The number of leaf values of a JSON document.
fn leaves(value: &Value) -> usize {
    match value {
        Value::Array(values) => values.iter().map(leaves).sum(),
        Value::Object(fields) => fields.values().map(leaves).sum(),
        _ => 1,
    }
}

/// The n-th leaf value.
fn leaf<'v>(value: &'v mut Value, n: &mut usize) -> Option<&'v mut Value> {
    match value {
        Value::Array(values) => values.iter_mut().find_map(|value| leaf(value, n)),
        Value::Object(fields) => fields.values_mut().find_map(|value| leaf(value, n)),
        _ if *n == 0 => Some(value),
        _ => {
            *n -= 1;
            None
        }
    }
}

fn number(variable: &str, otherwise: u64) -> u64 {
    std::env::var(variable).map_or(otherwise, |text| text.parse().expect(variable))
}

/// Runs a fuzz target. At least `least` percent of the mutations must pass its first parser; otherwise the run tests
/// next to nothing.
fn run_target(target: &str, rounds: u64, least: u64, body: fn(&[u8]) -> bool) {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(target);
    let mut files: Vec<_> = fs::read_dir(&directory)
        .expect("a corpus")
        .map(|entry| entry.expect("an entry").path())
        .collect();
    files.sort();
    let corpus: Vec<Vec<u8>> = files.iter().map(|file| fs::read(file).expect("an input")).collect();
    assert!(!corpus.is_empty(), "{} is empty", directory.display());
    let attempt = |bytes: &[u8], origin: &dyn Fn() -> String| {
        catch_unwind(AssertUnwindSafe(|| body(bytes))).unwrap_or_else(|panic| {
            println!("{target}, {}: {:?}", origin(), String::from_utf8_lossy(bytes));
            println!("as bytes: {bytes:?}");
            resume_unwind(panic)
        })
    };
    for (file, bytes) in files.iter().zip(&corpus) {
        attempt(bytes, &|| file.display().to_string());
    }
    let seed = number("FUZZ_SEED", 0x9e37_79b9_7f4a_7c15);
    let mut random = Random(seed.max(1));
    let rounds = number("FUZZ_ROUNDS", rounds);
    let mut reached = 0;
    for round in 0..rounds {
        reached += u64::from(attempt(&random.near(&corpus), &|| {
            format!("seed {seed}, round {round}")
        }));
    }
    println!("{target}: {reached} of {rounds}");
    assert!(
        reached * 100 >= least * rounds,
        "{reached} of {rounds} inputs pass the first parser"
    );
}

// threat: hostile-object
#[test]
fn mutated_objects_are_refused_or_read_as_written() {
    run_target("object", ROUNDS, 40, objects::object);
}

// threat: hostile-object
#[test]
fn mutated_annotations_never_panic_or_give_invalid_hosts() {
    run_target("annotation", ROUNDS, 5, objects::annotation);
}

// threat: hostile-object
#[test]
fn mutated_peers_and_policies_never_open_a_node() {
    run_target("compiled", ROUNDS, 30, objects::compiled);
}

// threat: crafted-offload
#[test]
fn mutated_offload_headers_never_split_beyond_the_packet() {
    run_target("superpacket", ROUNDS, 40, packets::superpacket);
}

// threat: crafted-offload
#[test]
fn coalesced_packets_are_split_into_the_same_packets() {
    run_target("inner", ROUNDS, 25, packets::inner);
}

// threat: icmp-error-abuse
#[test]
fn icmp_errors_are_valid_small_and_cause_no_further_error() {
    run_target("unreachable", ROUNDS, 50, packets::unreachable);
}

// threat: replayed-message
#[test]
fn session_delivers_only_sent_packets_and_each_once() {
    run_target("datagram", SESSIONS, 35, packets::datagram);
}
