//! Each message beside an implementation that others wrote: boringtun, in memory. Kernel and wireguard-go are met over real sockets, in
//! wg-agent's tests.

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr},
    sync::Arc,
    time::{Duration, Instant},
};

use boringtun::noise::{Packet, Tunn, TunnResult, rate_limiter::RateLimiter};
use clustermesh_wireguard::{
    Gate, Keys, Local, Macs, Refused, Timestamp, Verdict, initiate,
    message::{HEADER, Message, OVERHEAD},
    read_initiation,
};
use x25519_dalek::StaticSecret;

const HERE: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);
const AT: SocketAddr = SocketAddr::new(HERE, 51820);
const NO_KEY: [u8; 32] = [0; 32];

fn local(number: u8) -> Local {
    Local::new(StaticSecret::from([number; 32]))
}

fn other(own: &Local, peer: &Local, psk: Option<[u8; 32]>) -> Tunn {
    Tunn::new(own.private.clone(), peer.public, psk, None, 7, None)
}

/// An IPv4 packet of 24 bytes.
fn packet(number: u8) -> Vec<u8> {
    let mut packet = vec![0x45, 0, 0, 24, 0, 0, 0, 0, 64, 17, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2];
    packet.extend([number; 4]);
    packet
}

fn network(result: TunnResult<'_>) -> Vec<u8> {
    match result {
        TunnResult::WriteToNetwork(message) => message.to_vec(),
        other => panic!("{other:?}"),
    }
}

fn stamp(seconds: u64) -> Timestamp {
    Timestamp::after(Timestamp::default(), Duration::from_secs(seconds))
}

fn seal(keys: &mut Keys, packet: &[u8], now: Instant) -> Vec<u8> {
    let mut datagram = [&[0; HEADER], packet, &[0; OVERHEAD - HEADER]].concat();
    assert_eq!(keys.seal(&mut datagram, packet.len(), now), Some(datagram.len()));
    datagram
}

/// Both directions of a session that stands.
fn talk(keys: &mut Keys, other: &mut Tunn, now: Instant) {
    let mut scratch = [0; 256];
    for number in 1..=3 {
        let sealed = seal(keys, &packet(number), now);
        assert_eq!(sealed.len(), packet(number).len() + OVERHEAD);
        match other.decapsulate(Some(HERE), &sealed, &mut scratch) {
            TunnResult::WriteToTunnelV4(inner, _) => assert_eq!(inner, packet(number)),
            other => panic!("{other:?}"),
        }
        let mut data = network(other.encapsulate(&packet(number + 10), &mut scratch));
        let again = data.clone();
        let opened = keys.open(&mut data, now).expect("authentic");
        assert_eq!(data[opened.packet], packet(number + 10));
        assert_eq!(keys.open(&mut again.clone(), now), Err(Refused::Replayed));
    }
}

#[test]
fn a_session_that_we_begin_carries_data_both_ways_with_and_without_a_preshared_key() {
    for psk in [None, Some([9; 32])] {
        let (us, them, now) = (local(1), local(2), Instant::now());
        let mut other = other(&them, &us, psk);
        let psk = psk.unwrap_or(NO_KEY);
        let (mut initiator, mut message) = initiate(&us, &them.public, &psk, 0x0102_0304, stamp(1000)).expect("begins");
        let mut macs = Macs::new(&them.public);
        macs.seal(&mut message, now);
        let mut scratch = [0; 256];
        let response = network(other.decapsulate(Some(HERE), &message, &mut scratch));
        let Some(Message::Response(response)) = Message::parse(&response) else {
            panic!("{response:?}")
        };
        let mut forged = *response;
        forged[20] ^= 1;
        assert_eq!(initiator.finish(&forged, now).map(drop), Err(Refused::Invalid));
        let mut keys = Keys::default();
        keys.initiated(
            initiator
                .finish(response, now)
                .expect("the true one, after a forged one"),
        );
        let keepalive = seal(&mut keys, &[], now);
        assert!(matches!(
            other.decapsulate(Some(HERE), &keepalive, &mut scratch),
            TunnResult::Done
        ));
        talk(&mut keys, &mut other, now);
    }
}

#[test]
fn a_session_that_we_answer_is_ours_to_send_by_once_the_peer_has_spoken() {
    for psk in [None, Some([9; 32])] {
        let (us, them, now) = (local(1), local(2), Instant::now());
        let mut other = other(&them, &us, psk);
        let mut scratch = [0; 256];
        let message = network(other.format_handshake_initiation(&mut scratch, false));
        let Some(Message::Initiation(message)) = Message::parse(&message) else {
            panic!("{message:?}")
        };
        let initiation = read_initiation(&us, message).expect("for us");
        assert_eq!(initiation.peer(), &them.public);
        let psk = psk.unwrap_or(NO_KEY);
        let (mut response, session) = initiation.answer(&psk, 0x0102_0304, now).expect("an answer");
        Macs::new(&them.public).seal(&mut response, now);
        let mut keys = Keys::default();
        keys.answered(session);
        assert_eq!((keys.ready(now), keys.awaited()), (false, true));
        let mut keepalive = network(other.decapsulate(Some(HERE), &response, &mut scratch));
        let opened = keys.open(&mut keepalive, now).expect("authentic");
        assert_eq!((opened.packet.len(), opened.confirmed), (0, true));
        assert_eq!((keys.ready(now), keys.awaited()), (true, false));
        talk(&mut keys, &mut other, now);
    }
}

#[test]
fn another_preshared_key_another_receiver_or_a_changed_byte_make_no_session() {
    let (us, them, now) = (local(1), local(2), Instant::now());
    let mut other = other(&them, &us, Some([9; 32]));
    let mut scratch = [0; 256];
    let message = network(other.format_handshake_initiation(&mut scratch, false));
    let message: [u8; 148] = message.try_into().expect("an initiation");
    assert_eq!(read_initiation(&them, &message).map(drop), Err(Refused::Invalid));
    for at in [8, 40, 90, 115] {
        let mut changed = message;
        changed[at] ^= 1;
        assert_eq!(
            read_initiation(&us, &changed).map(drop),
            Err(Refused::Invalid),
            "byte {at}"
        );
    }
    let initiation = read_initiation(&us, &message).expect("for us");
    let (mut response, _) = initiation.answer(&NO_KEY, 1, now).expect("an answer");
    Macs::new(&them.public).seal(&mut response, now);
    assert!(matches!(
        other.decapsulate(Some(HERE), &response, &mut scratch),
        TunnResult::Err(_)
    ));
}

#[test]
fn a_key_that_gives_everybody_the_same_secret_is_refused() {
    let us = local(1);
    let low = x25519_dalek::PublicKey::from([0; 32]);
    assert_eq!(
        initiate(&us, &low, &NO_KEY, 1, stamp(1)).map(drop),
        Err(Refused::Invalid)
    );
    // The same, sent to us as an ephemeral key.
    let (_, mut message) = initiate(&local(2), &us.public, &NO_KEY, 1, stamp(1)).expect("begins");
    message[8..40].fill(0);
    assert_eq!(read_initiation(&us, &message).map(drop), Err(Refused::Invalid));
}

#[test]
fn under_load_the_other_asks_for_a_cookie_and_takes_ours() {
    let (us, them, now) = (local(1), local(2), Instant::now());
    let limiter = Arc::new(RateLimiter::new(&them.public, 0));
    let mut macs = Macs::new(&them.public);
    let begin = |macs: &mut Macs, seconds| {
        let (_, mut message) = initiate(&us, &them.public, &NO_KEY, 5, stamp(seconds)).expect("begins");
        macs.seal(&mut message, now);
        message
    };
    let first = begin(&mut macs, 1000);
    let mut scratch = [0; 256];
    let Err(TunnResult::WriteToNetwork(reply)) = limiter.verify_packet(Some(HERE), &first, &mut scratch) else {
        panic!("no cookie")
    };
    let Some(Message::CookieReply(reply)) = Message::parse(reply) else {
        panic!("no reply")
    };
    let reply = *reply;
    let mut forged = reply;
    forged[63] ^= 1;
    assert_eq!(macs.take(&forged, now), Err(Refused::Invalid));
    assert_eq!(macs.take(&reply, now), Ok(()));
    assert_eq!(macs.take(&reply, now), Err(Refused::UnknownSession), "once");
    let second = begin(&mut macs, 1001);
    assert!(matches!(
        limiter.verify_packet(Some(HERE), &second, &mut scratch),
        Ok(Packet::HandshakeInit(_))
    ));
}

#[test]
fn under_load_we_ask_for_a_cookie_and_only_from_its_owner_it_helps() {
    let (us, them, now) = (local(1), local(2), Instant::now());
    let mut other = other(&them, &us, None);
    let gate = Gate::new(&us.public, 1);
    let mut scratch = [0; 256];
    let quiet = network(other.format_handshake_initiation(&mut scratch, false));
    assert!(matches!(
        gate.judge(&quiet, AT, now),
        Verdict::Pass(Message::Initiation(_))
    ));
    let first = network(other.format_handshake_initiation(&mut scratch, true));
    let Verdict::Reply(reply) = gate.judge(&first, AT, now) else {
        panic!("no cookie")
    };
    other.decapsulate(Some(HERE), &reply, &mut scratch);
    let second = network(other.format_handshake_initiation(&mut scratch, true));
    assert!(matches!(gate.judge(&second, AT, now), Verdict::Pass(_)));
    let elsewhere = SocketAddr::new(HERE, 51821);
    assert!(matches!(gate.judge(&second, elsewhere, now), Verdict::Reply(_)));
    let after = now + Duration::from_secs(1);
    assert!(
        matches!(gate.judge(&first, elsewhere, after), Verdict::Pass(_)),
        "another second"
    );
    assert!(matches!(gate.judge(&first, elsewhere, after), Verdict::Reply(_)));
}

#[test]
fn what_names_another_key_is_not_looked_at() {
    let (us, them, now) = (local(1), local(2), Instant::now());
    let mut to_others = other(&us, &local(3), None);
    let gate = Gate::new(&them.public, u64::MAX);
    let mut scratch = [0; 256];
    let message = network(to_others.format_handshake_initiation(&mut scratch, false));
    assert_eq!(gate.judge(&message, AT, now), Verdict::Invalid);
    assert_eq!(gate.judge(&[4; 40], AT, now), Verdict::Invalid);
}
