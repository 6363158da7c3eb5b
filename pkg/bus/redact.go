package bus

import "regexp"

// credentials is what comes before the @ of a URL, without its scheme.
var credentials = regexp.MustCompile(`([A-Za-z]+://)?[^\s,"]*@`)

// RedactURL hides the credentials of the servers' URLs in a text, for logs and people:
// all that comes before an @, for a token is written where a user's name is.
func RedactURL(text string) string { return credentials.ReplaceAllString(text, "${1}***@") }
