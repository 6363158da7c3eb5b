// Package bus carries the contract's events over NATS JetStream: it creates the
// streams, publishes with confirmation, consumes with bounded pulls, and settles
// every message in one of four ways. At-least-once delivery, exactly-once effect.
//
// Publishing: an event's subject is its idempotency key. A publish returns when the
// server has stored the event or refused it as a duplicate, which counts as success.
// What may pass (a restart, a lost connection) is tried again with the same id until
// the context ends; a full stream is ErrStreamFull, for the caller to wait or to give
// up; what can never succeed is a *TerminalError.
//
// Consuming: Consume reads, processes, forwards, acks. The handler publishes its
// results and returns nil, and only then is the message acked (and the ack
// confirmed). An error means: later again. A TerminalError, or the last of
// MaxDeliver failures, means: dead letter first, then off the stream. Handlers run
// concurrently and must be idempotent: a message can always come twice, and whoever
// had it before may still be at work.
//
// The server counts AckWait from the delivery, so a message is only asked for when a
// handler is free to take it, and its server is told that it is alive every third of
// AckWait. The package never uses the client library's own prefetching: 500 large
// messages asked for at once get a client disconnected.
//
// Reading (Get, Last, LastMany, Read) takes nothing off a stream and leaves no state
// on the server.
package bus
