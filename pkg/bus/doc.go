// Package bus carries the contract's events over NATS JetStream. A Bus is one connection: it creates the streams,
// publishes with confirmation, consumes with bounded pulls and reads. Delivery is at least once, the effect exactly
// once.
//
// Publishing: an event's subject is its idempotency key. A publish returns when the server has stored the event, or
// has refused it as a duplicate, which counts as success. After a failure that can pass (a restart, a lost
// connection) it sends the event again with the same id, until the context ends. A full stream is ErrStreamFull:
// the caller waits or gives up. What can never succeed is a *TerminalError. A Publisher does the same without
// waiting for each confirmation.
//
// Consuming: a durable is a consumer whose progress the server keeps; all replicas of a service share it. Consume
// calls a handler for each message. The handler publishes its results and returns nil; then Consume acks the
// message and waits until the server has confirmed the ack. After another error the server delivers the message
// again later. After a TerminalError, or the last of MaxDeliver failures, Consume writes a dead letter (a copy of
// the message, with the reason) and then takes the message off the stream. Handlers run concurrently and must be
// idempotent: a message can come twice, while its first handler is still at work. A Subscription gives the messages
// to its caller, who acknowledges them.
//
// The server counts AckWait from the delivery. So the package asks for a message only when a handler is free, and
// sends a heartbeat for each message in flight every third of AckWait. It never uses the client library's
// prefetching: the server disconnects a client that asks for 500 large messages at once.
//
// Reading (Get, Last, LastMany, Read) takes nothing off a stream and leaves no state on the server.
//
// A guarded stream keeps the first message on each subject. If that is not the event that the subject is for, the
// publisher of the true event displaces it: copies it to the dead letters and deletes it. A lane is the request
// queue of a model, with its own current policy (a version of the weights).
//
// A control is an operator's pause, resume, cancel or prune of a run. A denial is what the server did not allow a
// user; the server sends it outside of any reply, so that a caller would only see a timeout. Of a consumer with a
// priority group the server serves one client at a time, which it has pinned. Samplers reserve space for the steps of
// a sample before they begin it (a StepSpace); space is ample while they need not ask each other. A sweep removes
// what no stored event names any more.
//
// Errors: while the server is away, calls are repeated (retryWhileAway) for a bounded time. Unless a comment says
// more, an error is one of the server or of ctx.
//
// Where it is: what Consume and Subscription share is in durable.go (the durable), pull.go (asking for messages),
// heartbeat.go and fair.go (messages whose kind fails); a Publisher's window in window.go. Reading is in get.go,
// read.go and, for clusters, leader.go: there a request may meet a server that lags, so that a reader asks the leader
// how far to read. Setup calls setup.go and replicas.go, the janitor blobsweep.go, samplers
// stepspace.go and sweep.go, and health checks storage.go, examine.go and denied.go.
package bus
