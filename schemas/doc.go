// Package schemas is the wire contract of meander: the event structs, the
// subjects they travel on, the streams that store them, their msgpack codec and
// their validation. It has no behaviour beyond that and imports no other package
// of the project, so a client needs nothing else.
//
// An event is one msgpack map with snake_case keys. Unknown keys are ignored on
// read; keys are added, never renamed or reused. Every event carries "v", the
// schema version of its type. Times are int64 Unix nanoseconds. A pointer field
// is optional: absent (or null) means the default stated in its comment, which is
// different from an explicit zero.
//
// The same registry (Streams, Events) creates the JetStream streams, the JSON
// Schemas in jsonschema/ and the AsyncAPI document asyncapi.yaml.
package schemas
