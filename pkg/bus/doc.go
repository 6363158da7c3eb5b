// Package bus carries the contract's events over NATS JetStream. A Bus is one connection: it creates the streams,
// publishes with confirmation, consumes with bounded pulls and reads. Delivery is at least once, the effect exactly
// once.
//
// Publishing: an event's subject is its idempotency key. A publish returns when the server has stored the event, or
// has refused it as a duplicate, which counts as success. After a failure that can pass it sends the event again with
// the same id, until the context ends. A full stream is ErrStreamFull. What can never succeed is a *TerminalError. A
// Publisher does the same without waiting for each confirmation. A guarded stream keeps the first message on each
// subject; the publisher of the true event displaces what is not that event: copies it to the dead letters and deletes
// it.
//
// Consuming: a durable is a consumer whose progress the server keeps; all replicas of a service share it. Consume
// calls a handler for each message, and acks the message when the handler has published its results. After an error
// the server delivers it again later; after a TerminalError, or the last of MaxDeliver failures, Consume writes a dead
// letter. Handlers run concurrently and must be idempotent: a message can come twice, while its first handler is still
// at work. A Subscription gives the messages to its caller, who acknowledges them. The server counts AckWait from the
// delivery, so the package asks for a message only when a handler is free, and sends heartbeats for messages in flight.
//
// Reading (Get, Last, LastMany, Read) takes nothing off a stream and leaves no state on the server. In a cluster a
// request may meet a server that lags, so a reader asks the leader how far to read (leader.go).
//
// A denial is what the server did not allow a user; the server sends it outside of any reply, so that a caller would
// only see a timeout. While the server is away, calls are repeated (retryWhileAway) for a bounded time. Unless a
// comment says more, an error is one of the server or of ctx.
package bus
