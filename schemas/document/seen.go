package document

import (
	"reflect"

	"github.com/meander-rl/meander/schemas"
)

// asyncSchema is the format of schemas that are in the document itself.
const asyncSchema = "application/vnd.aai.asyncapi+json;version=3.0.0"

// rawMessage returns the message of a channel that carries bytes.
func rawMessage(c channel, contentType, describes string) message {
	return message{
		Name: c.name, Title: c.name, Summary: c.summary, ContentType: contentType,
		Payload: payload{Format: asyncSchema, Schema: node(headerSchema{Type: "string", Description: describes})},
	}
}

// seenMessage returns the question for a prediction, which is JSON.
func seenMessage(c channel) message {
	fields := ordered[headerSchema]{}
	question := reflect.TypeFor[schemas.Seen]()
	names := []string{}
	for i := range question.NumField() {
		f := question.Field(i)
		kind := "integer"
		if f.Type.Kind() == reflect.String {
			kind = "string"
		}
		names = append(names, f.Tag.Get("json"))
		fields = append(fields, entry[headerSchema]{f.Tag.Get("json"), headerSchema{Type: kind}})
	}
	return message{
		Name: c.name, Title: c.name, Summary: c.summary, ContentType: "application/json",
		Payload: payload{
			Format: asyncSchema, Schema: node(headers{Type: "object", Properties: fields, Required: names}),
		},
	}
}

// seenReply returns the answer to it, which is an image.
func seenReply(c channel) message {
	m := rawMessage(c, "image/png", "a PNG of at most 256 pixels a side; empty where the header says why")
	m.Headers = &headers{Type: "object", Required: []string{}, Properties: ordered[headerSchema]{
		{schemas.HeaderSeenError, headerSchema{Type: "string", Description: "why there is none"}},
	}}
	return m
}
