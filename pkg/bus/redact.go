package bus

import "regexp"

var credentials = regexp.MustCompile(`([A-Za-z]+://)?[^\s,"]*@`)

// RedactURL hides the credentials in the URLs of a text, for logs and people: everything before an @, since a token
// is written where a user's name would be.
func RedactURL(text string) string { return credentials.ReplaceAllString(text, "${1}***@") }
