"""Wall: pure. Several guests as one router: group files, members, parallel and multistage
routers, members made from a template."""
