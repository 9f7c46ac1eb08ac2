use netlink_packet_core::NLMSG_ERROR;
use netlink_packet_route::{RouteNetlinkMessage, link::LinkMessage};

use super::*;

fn message(message_type: u16, flags: u16, payload: &[u8]) -> Vec<u8> {
    let mut header = NetlinkHeader::default();
    header.length = u32::try_from(HEADER + payload.len()).unwrap();
    header.message_type = message_type;
    header.flags = flags;
    let mut bytes = vec![0; HEADER];
    header.emit(&mut bytes);
    bytes.extend(payload);
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    bytes
}

/// Reads the result in the datagram's only message.
fn result_of_only_message(datagram: &[u8]) -> Result<(), Error> {
    let mut messages = split(datagram);
    let (header, payload) = messages.next().unwrap().unwrap();
    assert!(messages.next().is_none());
    read_result(&header, payload)
}

/// Encodes the attribute with the kernel's reason.
fn reason(text: &str) -> Vec<u8> {
    let mut bytes = u16::try_from(4 + text.len() + 1).unwrap().to_ne_bytes().to_vec();
    bytes.extend(NLMSGERR_ATTR_MSG.to_ne_bytes());
    bytes.extend(text.as_bytes());
    bytes.push(0);
    bytes
}

#[test]
fn truncated_datagram_gives_no_partial_message() {
    let datagram = [message(20, 0, b"hello"), message(21, 0, b"")].concat();
    let all: Vec<_> = split(&datagram).map(Result::unwrap).collect();
    let seen: Vec<_> = all
        .iter()
        .map(|(header, payload)| (header.message_type, *payload))
        .collect();
    assert_eq!(seen, [(20, &b"hello"[..]), (21, &b""[..])]);
    for cut in 1..datagram.len() {
        let whole = split(&datagram[..cut]).filter(Result::is_ok).count();
        // A message is whole even without its padding, so a cut between the first payload and the second message leaves no error.
        assert_eq!(whole, usize::from(cut >= HEADER + 5), "{cut}");
        let ends_after_first = (HEADER + 5..=HEADER + 8).contains(&cut);
        assert_eq!(
            split(&datagram[..cut]).all(|message| message.is_ok()),
            ends_after_first,
            "{cut}"
        );
    }
    // A length shorter than the header.
    assert!(split(&[0; HEADER]).next().unwrap().is_err());
}

#[test]
fn acknowledgement_has_code_and_reason() {
    let code = (-22_i32).to_ne_bytes();
    let request = message(24, 0, b"a request");
    result_of_only_message(&message(NLMSG_ERROR, 0, &[0; 4])).unwrap();
    for (kind, flags, payload) in [
        (
            NLMSG_ERROR,
            NLM_F_ACK_TLVS,
            [&code[..], &request, &reason("no")].concat(),
        ),
        (
            NLMSG_ERROR,
            NLM_F_ACK_TLVS | NLM_F_CAPPED,
            [&code[..], &request[..HEADER], &reason("no")].concat(),
        ),
        (NLMSG_DONE, NLM_F_ACK_TLVS, [&code[..], &reason("no")].concat()),
    ] {
        let error = result_of_only_message(&message(kind, flags, &payload)).unwrap_err();
        assert_eq!(error.to_string(), "Invalid argument (os error 22): no");
        for cut in 4..payload.len() {
            result_of_only_message(&message(kind, flags, &payload[..cut])).unwrap_err();
        }
    }
    let error = result_of_only_message(&message(NLMSG_ERROR, 0, &[&code[..], &request].concat())).unwrap_err();
    assert_eq!(
        (error.errno(), error.to_string()),
        (Some(Errno::INVAL), "Invalid argument (os error 22)".into())
    );
}

#[test]
fn encoded_request_is_split_and_parsed() {
    let request = RouteNetlinkMessage::GetLink(LinkMessage::default());
    let bytes = encode(&request, NLM_F_ACK_TLVS, 7);
    let (header, payload) = split(&bytes).next().unwrap().unwrap();
    assert_eq!(
        (header.flags, header.sequence_number),
        (NLM_F_REQUEST | NLM_F_ACK_TLVS, 7)
    );
    assert_eq!(parse::<RouteNetlinkMessage>(&header, payload).unwrap(), request);
    let message = Message::from_parts(header, payload);
    assert_eq!(message.parse::<RouteNetlinkMessage>().unwrap(), request);
    // A message of an unknown type.
    Message::new(9_999, Vec::new())
        .parse::<RouteNetlinkMessage>()
        .unwrap_err();
}
